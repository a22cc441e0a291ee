"""What every adapter does: read the declaration, bring arrays of any batch rank to rank 4, and apply the framework's call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp

from ..call_arguments import CallArguments
from ..errors import ConfigError, InputError, a_type
from ..masks import Dense, Mask
from ..operators.api.attention import Attention
from ..operators.call.arrays import is_array
from ..registry.declaration import Declaration
from ..scores import Score

__all__ = ["DEFAULT_PRECISIONS", "Attended", "Declared", "attend", "declared_attention", "refuse_score"]

Declared: TypeAlias = Attention | Declaration | Mapping[str, Any] | str | Path
DEFAULT_PRECISIONS = (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT)
"""What a framework may pass as the precision of its products; here it follows from their dtype."""
_TRAILING = 3


class Attended(NamedTuple):
    """The output, shaped as the query; weights [..., heads, q, kv] and lse [..., heads, q], None if not requested."""

    output: jax.Array
    weights: jax.Array | None
    lse: jax.Array | None


def declared_attention(declared: Declared, metadata: Mapping[str, Any]) -> Attention:
    """The Attention of an adapter's argument. Errors: ConfigError for what a framework's call has no place for."""
    if isinstance(declared, Attention):
        if metadata:
            raise ConfigError(
                f"{', '.join(metadata)}: given with an Attention, which has its own metadata; pass them to Attention(...)."
            )
        attention = declared
    else:
        attention = Attention(declared, **metadata)
    for name in ("return_weights", "return_lse"):
        if getattr(attention.declaration.call, name):
            raise ConfigError(
                f"call.{name} is declared, but a framework's attention returns only its output; remove it for an "
                "adapter."
            )
    return attention


def refuse_score(score: Score | None) -> None:
    """Refuse a score beside a declaration that leaves attention to the framework. Errors: ConfigError."""
    if score is not None:
        raise ConfigError(
            f'score={score}, but the declaration says "enabled": false, and the framework\'s own attention takes no score; '
            "leave one of them out."
        )


def attend(
    attention: Attention,
    query: Any,
    key: Any,
    value: Any,
    *,
    remarks: tuple[str, ...] = (),
    structure: Mask | None = None,
    **call: Unpack[CallArguments],
) -> Attended:
    """Attend with any number of batch dimensions, including none. `call` gives the layout; None stands for what isn't specified.

    Shapes: query [..., q, heads, dim] (layout bthd) or [..., heads, q, dim] (bhtd), key and value likewise; mask (anything
    that compares with 0) and bias broadcast to [..., heads, q, kv] from the right, as in NumPy. causal=False is the frameworks'
    default: the file's own value then applies, and without one the call isn't causal. `remarks` are added to the notes of the
    plan that is kept. `structure`: a mask object of the call, intersected with `mask`; in its arrays, lengths and scales the
    batch dimensions are one.
    Errors: InputError for shapes; ConfigError where the file and the framework's call disagree.
    """
    layout = call["layout"]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if is_array(x) and len(x.shape) < _TRAILING:
            raise InputError(f"{name} has shape {tuple(x.shape)}; wanted [..., {', '.join(_axes(layout))}].")
    batch = query.shape[:-_TRAILING]
    for name, x in (("key", key), ("value", value)):
        if x.shape[:-_TRAILING] != batch:
            raise InputError(f"{name} has batch dimensions {x.shape[:-_TRAILING]}, query has {batch}; wanted the same.")
    at = {axis: index - _TRAILING for index, axis in enumerate(layout[1:])}
    cells = (*batch, query.shape[at["h"]], query.shape[at["t"]], key.shape[at["t"]])
    call["dropout_prob"] = probability = call.get("dropout_prob") or 0.0
    _check_dropout(attention, probability)
    if probability == 0:
        call.pop("deterministic", None)
    if call.get("deterministic", True):
        call.pop("dropout_rng", None)
    mask, bias = call.get("mask"), call.get("bias")
    with _as_it_is(mask):
        four = None if mask is None else _four("mask", _boolean(mask), cells)
    call["mask"] = four if structure is None else structure if four is None else Dense(four) & structure
    call["bias"] = None if bias is None else _four("bias", bias, cells)
    call["causal"] = _causal(attention, bool(call.get("causal")))
    if structure is not None and call["causal"] is None and attention.declaration.call.causal is None:
        call["causal"] = attention.operation.metadata.causal  # it isn't a default for mask objects, but it is declared
    arrays = (jnp.reshape(x, (math.prod(batch), *x.shape[-_TRAILING:])) for x in (query, key, value))
    result = attention.run(remarks, *arrays, **call)
    output, weights, lse = (None if x is None else x.reshape(*batch, *x.shape[1:]) for x in result)
    assert output is not None  # always requested
    return Attended(output, weights, lse)


def _causal(attention: Attention, causal: bool) -> bool | None:
    """The framework's value. If it is the default: None if the file has a value, else False, flax's and torch's default.

    The metadata's own default, True, is for direct calls of attnops.
    """
    is_declared = attention.declaration.call.causal is not None or attention.states("causal")
    return True if causal else None if is_declared else False


def _check_dropout(attention: Attention, probability: float) -> None:
    declared = attention.operation.metadata.dropout_prob
    if attention.states("dropout_prob") and declared != probability:
        raise ConfigError(
            f"dropout_prob: the file's metadata declares {declared}, the framework's call has {probability}; remove it from the "
            "file: the framework has the key and the flag for it."
        )


def _four(name: str, x: Any, cells: tuple[int, ...]) -> Any:
    """An array that broadcasts to [..., heads, q, kv] brought to rank 4; dimensions that can stay 1 do."""
    shape = tuple(x.shape)
    if len(shape) > len(cells) or any(n not in (1, m) for n, m in zip(shape[::-1], cells[::-1], strict=False)):
        raise InputError(
            f"{name} has shape {shape}; wanted one that broadcasts to {cells}, [..., heads, query length, key length]. Hint: for "
            f"[batch, key length] pass {name}[:, None, None, :]."
        )
    shape = (1,) * (len(cells) - len(shape)) + shape
    batch, batch_shape = cells[:-_TRAILING], shape[:-_TRAILING]
    x = x.reshape(shape)
    if any(n != 1 for n in batch_shape) and batch_shape != batch:
        x = jnp.broadcast_to(x, (*batch, *shape[-_TRAILING:]))
        batch_shape = batch
    return x.reshape(math.prod(batch_shape), *shape[-_TRAILING:])


def _boolean(mask: Any) -> Any:
    if not is_array(mask):
        raise InputError(f"mask is {a_type(mask)}; wanted an array that broadcasts to [..., heads, q, kv].")
    return mask if mask.dtype == bool else mask != 0


def _as_it_is(mask: Any) -> Any:
    """A mask with known values keeps them while something else is traced, so that the plan can describe it."""
    return contextlib.nullcontext() if isinstance(mask, jax.core.Tracer) else jax.ensure_compile_time_eval()


def _axes(layout: str) -> list[str]:
    names = {"t": "length", "h": "heads", "d": "head dim"}
    return [names[axis] for axis in layout[1:]]
