"""torch: scaled_dot_product_attention on torch tensors, run by JAX. Needs torch (`pip install 'attnops[torch]'`).

Tensors go over and come back through DLPack, without a copy where they lie densely on JAX's own device; torchax's tensors,
which are JAX arrays, as those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, InputTypeError, RefusedError
from ..operators.attention import Attention
from .extra import extra
from .front import Declared, attend, declared_attention

with extra("torch"):
    import torch

    from .torch_tensors import check_tensor, dropout_key, to_jax, to_torch

__all__ = ["ScaledDotProductAttention", "scaled_dot_product_attention", "scaled_dot_product_attention_for"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEPT = 512  # compiled calls of one function


class _Options(NamedTuple):
    """What gets compiled in. `shape`: of the output."""

    causal: bool
    scale: float | None
    dropout_p: float
    shape: tuple[int, ...]


def scaled_dot_product_attention_for(declared: Declared, **metadata: Any) -> Callable[..., torch.Tensor]:
    """A function like torch.nn.functional.scaled_dot_product_attention that runs what is declared.

    declared: an Attention, a Declaration, its dict, or the path of its JSON file. metadata: fields of OperationMetadata that
    take the place of the file's, such as mesh. With "enabled": false it is torch's own function itself.
    """
    attention = declared_attention(declared, metadata)
    if not attention.enabled:
        return torch.nn.functional.scaled_dot_product_attention
    return ScaledDotProductAttention(attention)


class ScaledDotProductAttention:
    """A declared attention with torch's signature. `attention.plans` are the plans of the calls so far."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self._compiled: dict[_Options, Callable[..., Any]] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend; differentiable once by torch's autograd, in attn_mask too where it is a float that requires it.

        Shapes: query [..., heads, q, dim], key [..., kv_heads, kv, dim], value [..., kv_heads, kv, value_dim]; attn_mask,
        bool (True = may attend) or float (added to the logits), broadcasts to [..., heads, q, kv]. is_causal lets query i
        see the keys up to i, whatever the lengths. Errors: InputError, InputTypeError and ConfigError say what is refused.
        """
        given = {"query": query, "key": key, "value": value}
        for name, x in given.items():
            check_tensor(name, x, _DTYPES)
        if len({x.dtype for x in given.values()}) > 1:
            raise InputTypeError(
                f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; wanted one dtype."
            )
        if attn_mask is not None:
            check_tensor("attn_mask", attn_mask, (torch.bool, *_DTYPES))
            if is_causal:
                raise InputError(
                    "attn_mask with is_causal=True is an error, as in torch; put the triangle into attn_mask."
                )
            given["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
        shape = _output_shape(query, key, value, enable_gqa)
        if attn_mask is not None:
            _check_broadcasts(tuple(attn_mask.shape), (*shape[:-1], key.shape[-2]))
        options = _Options(is_causal, scale, float(dropout_p), shape)
        rng = dropout_key(query) if dropout_p > 0 else None
        if torch.is_grad_enabled() and any(x.requires_grad for x in given.values()):
            return _Differentiable.apply(self, options, rng, tuple(given), *given.values())
        arrays, home = to_jax(self.attention, given)
        return to_torch(_run(self.attention, options, arrays, rng), home)

    def forward(self, options: _Options) -> Callable[..., Any]:
        """The compiled call that gives the output and its pull-back: of the arrays to differentiate, the others and a key."""

        def call(inexact: dict[str, Any], rest: dict[str, Any], rng: Any) -> Any:
            return jax.vjp(lambda x: _run(self.attention, options, {**x, **rest}, rng), inexact)

        if options not in self._compiled and len(self._compiled) >= _KEPT:
            self._compiled.clear()
        return self._compiled.setdefault(options, jax.jit(call))

    def __reduce__(self) -> Any:
        return type(self), (self.attention,)

    def __eq__(self, other: object) -> bool:
        return self.attention == other.attention if isinstance(other, ScaledDotProductAttention) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.attention))

    def __repr__(self) -> str:
        return f"{__name__}.scaled_dot_product_attention_for({self.attention.declaration.to_json(indent=None)})"


scaled_dot_product_attention = ScaledDotProductAttention(Attention({"operation": "vanilla"}))


class _Differentiable(torch.autograd.Function):
    """JAX's gradient as torch's. Only what requires a gradient is differentiated: a bias' own is as large as the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        function: ScaledDotProductAttention,
        options: _Options,
        rng: Any,
        names: tuple[str, ...],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        arrays, home = to_jax(function.attention, dict(zip(names, tensors, strict=True)))
        wanted = tuple(name for name, need in zip(names, ctx.needs_input_grad[4:], strict=True) if need)
        inexact = {name: arrays.pop(name) for name in wanted}
        out, ctx.pull = function.forward(options)(inexact, arrays, rng)
        ctx.names, ctx.attention = names, function.attention
        result = to_torch(out, home)
        # The pull-back holds their memory; so torch's own check finds one that was changed in place.
        ctx.save_for_backward(*tensors, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # once_differentiable would let some of these pass, without a gradient
            raise RefusedError(
                "create_graph=True: attnops' attention has one derivative behind torch's autograd, not two; take the second in "
                "JAX, or use torch's own there."
            )
        _ = ctx.saved_tensors  # raises where one was changed in place
        arrays, home = to_jax(ctx.attention, {"gradient": gradient})
        (found,) = _backward(ctx.pull, arrays["gradient"])
        return (None, None, None, None, *(to_torch(found[n], home) if n in found else None for n in ctx.names))


def _run(attention: Attention, options: _Options, arrays: dict[str, Any], rng: Any) -> jax.Array:
    """The call, on arrays; query, key and value get the batch dimensions and heads that torch would broadcast them to."""
    query, key, value = (
        arrays[n].reshape((1,) * (3 - arrays[n].ndim) + arrays[n].shape) for n in ("query", "key", "value")
    )
    batch = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    kv_heads = max(key.shape[-3], value.shape[-3])
    q_heads = max(query.shape[-3], kv_heads)
    query, key, value = (
        jnp.broadcast_to(x, (*batch, heads, *x.shape[-2:]))
        for x, heads in ((query, q_heads), (key, kv_heads), (value, kv_heads))
    )
    found = attend(
        attention,
        query,
        key,
        value,
        layout="bhtd",
        causal=options.causal,
        query_offset=0 if options.causal else None,
        mask=arrays.get("mask"),
        bias=arrays.get("bias"),
        softmax_scale=options.scale,
        dropout_prob=options.dropout_p,
        dropout_rng=rng,
        deterministic=False,
    )
    return found.output.reshape(options.shape)


@jax.jit
def _backward(pull: Any, gradient: jax.Array) -> Any:
    return pull(gradient)


def _output_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Torch's shape of the output. Errors: InputError for shapes that torch refuses too."""
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    said = "query {}, key {} and value {}".format(*shapes)
    if min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]:
        raise InputError(
            f"{said}; wanted [..., heads, q, dim], [..., kv_heads, kv, dim], [..., kv_heads, kv, value_dim]."
        )
    leading = [shape[:-2] for shape in shapes]
    if enable_gqa:
        heads = [shape[-1] if shape else 1 for shape in leading]
        if heads[1] != heads[2] or heads[0] % heads[1]:
            raise InputError(
                f"{said}: enable_gqa wants as many key as value heads, and query heads a multiple of them."
            )
        leading = [(*shape[:-1], heads[0]) for shape in leading]
    try:
        return (*np.broadcast_shapes(*leading), shapes[0][-2], shapes[2][-1])
    except ValueError:
        hint = "" if enable_gqa else " Grouped heads need enable_gqa=True."
        raise InputError(f"{said}: the dimensions before the last two don't broadcast.{hint}") from None


def _check_broadcasts(shape: tuple[int, ...], cells: tuple[int, ...]) -> None:
    if len(shape) > len(cells) or any(n not in (1, m) for n, m in zip(shape[::-1], cells[::-1], strict=False)):
        raise InputError(
            f"attn_mask has shape {shape}; wanted one that broadcasts to {cells}, [..., heads, query length, key length]."
        )
