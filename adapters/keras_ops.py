"""keras: layers of other classes whose code calls keras.ops.dot_product_attention, as those of keras-hub do. Requires keras."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, InputError, shown
from ..operators.api.attention import Attention
from ..scores import Score
from .extra import extra
from .front import attend

with extra("keras"):
    import keras

__all__ = ["DeclaredCall", "calls_the_op", "declare_calls", "restore_calls"]

_OP = "dot_product_attention"
_CHOICE = "_use_fused_attention_op"  # keras-hub's name for the method that chooses between the op and the layer's own products


@dataclass(eq=False)
class _Running:
    """The attention that keras.ops.dot_product_attention runs in a layer's call now, and how often it was called."""

    attention: Attention
    score: Score | None = None
    calls: int = 0


_running: ContextVar[_Running | None] = ContextVar("attnops_keras_running", default=None)


def calls_the_op(layer: Any) -> bool:
    """Whether the code of a layer's class, or of a class between it and keras.Layer, calls keras.ops.dot_product_attention."""
    classes = [kind for kind in type(layer).__mro__ if not kind.__module__.startswith("keras.src.")]
    return any(
        _OP in names
        for kind in classes
        for function in vars(kind).values()
        if isinstance(function, types.FunctionType)
        for names in _names(function.__code__)
    )


def declare_calls(layer: Any, attention: Attention, score: Score | None = None) -> None:
    """Make one layer's calls of keras.ops.dot_product_attention run the declared attention.

    Errors: ConfigError for a layer with dropout of the weights, which the op has no argument for.
    """
    restore_calls(layer)
    if hasattr(layer, _CHOICE):
        if getattr(layer, "dropout", 0):
            raise ConfigError(
                f"layer {shown(layer.name)} has dropout={layer.dropout}, which keras.ops.{_OP} can't express, so the layer would "
                "compute its attention itself; set dropout=0."
            )
        setattr(layer, _CHOICE, _always)
    keras.ops.dot_product_attention = keras.ops.nn.dot_product_attention = _dispatch
    layer.call = DeclaredCall(layer, attention, layer.call, score)


def restore_calls(layer: Any) -> None:
    """Give a layer its own call back."""
    if isinstance(vars(layer).get("call"), DeclaredCall):
        del layer.call
        if vars(layer).get(_CHOICE) is _always:
            delattr(layer, _CHOICE)


@dataclass(frozen=True, eq=False)
class DeclaredCall:
    """A layer's `call`, in which keras.ops.dot_product_attention runs the declared attention, whose `plans` hold the calls'."""

    layer: Any
    attention: Attention
    original: Callable[..., Any]
    score: Score | None = None

    def __call__(self, *args: Any, **call: Any) -> Any:
        """What the layer's own call returns. Errors: InputError if it computed its attention without the op."""
        running = _Running(self.attention, self.score)
        token = _running.set(running)
        try:
            output = self.original(*args, **call)
        finally:
            _running.reset(token)
        if not running.calls:
            raise InputError(
                f"layer {shown(self.layer.name)}, a {type(self.layer).__name__}, didn't call keras.ops.{_OP} in this call, so "
                'the declared attention would be ignored. Hint: declare {"enabled": false} for this model, or call '
                "attnops.dot_product_attention in the layer."
            )
        return output


_original_op = keras.ops.dot_product_attention


@functools.wraps(_original_op)
def _dispatch(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    running = _running.get()
    if running is None:
        return _original_op(query, key, value, bias, mask, scale, is_causal, flash_attention, attn_logits_soft_cap)
    running.calls += 1
    if flash_attention:
        raise ConfigError(
            "flash_attention=True in a call of a declared layer; leave it None: the declaration decides what runs."
        )
    dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
    query, key, value = (keras.ops.cast(x, dtype) for x in (query, key, value))
    return attend(
        running.attention,
        query,
        key,
        value,
        layout="bthd",
        mask=mask,
        bias=bias,
        causal=is_causal,
        query_offset=0 if is_causal else None,
        score=running.score,
        softmax_scale=None if scale is None else float(scale),
        logits_soft_cap=attn_logits_soft_cap,
    ).output


def _always() -> bool:
    return True


def _names(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
