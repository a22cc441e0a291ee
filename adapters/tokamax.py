"""tokamax: dot_product_attention with tokamax's signature and meaning, run by a declared attention. Requires only jax.

tokamax itself is imported only for a declaration with "enabled": false.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import ConfigError, InputError, InputTypeError, a_type, shown
from ..masks import Causal, Mask, Positions, SlidingWindow
from ..operators.api.read_option import read_number
from ..operators.call.arrays import is_array
from .extra import extra
from .front import DEFAULT_PRECISIONS
from .jax_nn import Implementation, as_jax_nn, attention_named

__all__ = ["dot_product_attention"]

_TOKAMAX_NAMES = {
    "xla": "'vanilla' is attention on plain XLA",
    "xla_chunked": "'vanilla' works in blocks where that takes less memory",
    "cudnn": "'sdpa' is jax.nn's own, which takes cuDNN on CUDA",
    "mosaic": "'splash' has kernels for TPUs and 'flash_attn2' for GPUs",
    "triton": "'flash_attn2' has kernels for GPUs",
}
_RANGES = ("q_start", "q_end", "k_start", "k_end")


def dot_product_attention(
    query: Float[Array, "*batch q heads dim"],
    key: Float[Array, "*batch kv kv_heads dim"] | Any,
    value: Float[Array, "*batch kv kv_heads value_dim"] | Any,
    bias: Float[Array, "*bias_shape"] | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*batch"] | None = None,
    key_value_seq_lengths: Int[Array, "*batch"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    precision: Any = None,
    implementation: Implementation | None = "vanilla",
    q_sharding: Any = None,
) -> jax.Array:
    """Attend as tokamax.dot_product_attention does; `implementation` chooses what runs it, as in attnops.dot_product_attention.

    Shapes: query [*batch, q, heads, dim] with any number of batch dimensions; key and value likewise, arrays or qwix's QArrays;
    bias and mask broadcast to [*batch, heads, q, kv]; lengths int [*batch], where a size may be 1. mask may be tokamax's Mask,
    whose ranges are [*batch, 1, n]. Returns [*batch, q, heads, value_dim]; 0 for a query that sees no key or is beyond its
    length. Errors: ConfigError for what can't be carried, such as a bias under a soft cap or ranges that differ between heads;
    InputError, InputTypeError, RefusedError and UnknownNameError.
    """
    if isinstance(implementation, list | tuple):
        raise ConfigError(
            f"implementation={shown(implementation)}; wanted one: the operation is part of the declaration, and its plan says "
            "which method runs and why."
        )
    attention = attention_named(implementation, "tokamax", _TOKAMAX_NAMES)
    if not attention.enabled:
        with extra("tokamax"):
            import tokamax
        original: Any = tokamax.dot_product_attention
        return original(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap, precision=precision, q_sharding=q_sharding,
        )  # fmt: skip
    if q_sharding is not None:
        raise ConfigError(
            "q_sharding is given; here the declaration says where arrays live: pass an implementation with mesh= and "
            "partition_axis=."
        )
    if not all(item in DEFAULT_PRECISIONS for item in (precision if isinstance(precision, tuple) else (precision,))):
        raise ConfigError(
            f"precision={precision!r}: attnops' products keep the full precision of their dtype, so runtime_dtype decides how "
            "exact they are; leave precision out."
        )
    cap = read_number("logits_soft_cap", logits_soft_cap)
    declared = attention.declaration.call.logits_soft_cap
    if bias is not None and (cap is not None or declared is not None):
        raise ConfigError(
            f"bias with logits_soft_cap={cap if declared is None else declared:g}: tokamax adds the bias before the cap, "
            "cap * tanh((x + bias) / cap), attnops after it; leave one of them out."
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_array(x) and (name == "query" or not hasattr(x, "qvalue")):
            hint = (
                "; the query isn't quantised here: pass it in the dtype to compute in" if hasattr(x, "qvalue") else ""
            )
            raise InputTypeError(f"{name} is {a_type(x)}; wanted an array{hint}.")
        if len(x.shape) < 3:
            raise InputError(f"{name} has shape {tuple(x.shape)}; wanted [*batch, length, heads, dim].")
    causal, ranges = is_causal, None
    batch, q_len, kv_len = query.shape[:-3], query.shape[-3], key.shape[-3]
    if mask is not None and all(hasattr(mask, name) for name in (*_RANGES, "bool_mask", "is_causal")):
        ranges = _ranges(mask, batch, q_len, kv_len)
        diagonal = getattr(mask, "causal_mask", None)  # from 0.0.17 on, with an offset and a window; traced under jit
        if diagonal is not None and not mask.is_causal:
            band = _band(diagonal, math.prod(batch), q_len, kv_len)
            ranges = band if ranges is None else ranges & band
        causal, mask = bool(is_causal) or bool(mask.is_causal), mask.bool_mask
    scales = {}
    key, scales["key_scale"] = _stored("key", key, batch)
    value, scales["value_scale"] = _stored("value", value, batch)
    return as_jax_nn(
        attention,
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=causal,
        query_seq_lengths=_rows(query_seq_lengths, batch),
        key_value_seq_lengths=_rows(key_value_seq_lengths, batch),
        local_window_size=local_window_size,
        logits_soft_cap=cap,
        structure=ranges,
        **{name: x for name, x in scales.items() if x is not None},
    ).output


def _rows(lengths: Any, batch: tuple[int, ...]) -> Any:
    """Lengths of which a size is 1, for all rows; others as they are."""
    if not is_array(lengths) or lengths.shape == batch or len(lengths.shape) != len(batch):
        return lengths
    fits = all(n in (1, m) for n, m in zip(lengths.shape, batch, strict=True))
    return jnp.broadcast_to(lengths, batch) if fits else lengths


def _ranges(mask: Any, batch: tuple[int, ...], q_len: int, kv_len: int) -> Mask | None:
    """The ranges of tokamax's Mask as Positions. k_start and k_end are keys that a query sees from and up to, exclusive; q_start
    and q_end are queries that see a key."""
    ranges: Mask | None = None
    rows = math.prod(batch)

    def counted(n: int) -> np.ndarray:
        return np.broadcast_to(np.arange(n, dtype=np.int32), (rows, n))

    for name in _RANGES:
        bounds = getattr(mask, name)
        if bounds is None:
            continue
        of_query = name in ("k_start", "k_end")
        positions = _range(name, bounds, batch, q_len if of_query else kv_len)
        first = name.endswith("start")
        if not first:
            positions = positions - np.int32(1)  # the last one
        if of_query:
            limit = Positions(positions, counted(kv_len), left=0 if first else None, right=None if first else 0)
        else:
            limit = Positions(counted(q_len), positions, left=None if first else 0, right=0 if first else None)
        ranges = limit if ranges is None else ranges & limit
    return ranges


def _band(diagonal: Any, rows: int, q_len: int, kv_len: int) -> Mask:
    """tokamax's CausalMask: keys up to the row's index plus `offset`, of these the last `window_size`."""
    offset, window = diagonal.offset, diagonal.window_size
    if isinstance(offset, int) and isinstance(window, int | None):
        causal = Causal(offset=offset)
        return causal if window is None else causal & SlidingWindow(left=window - 1, right=None, offset=offset)
    last = jnp.broadcast_to(jnp.arange(q_len, dtype=jnp.int32) + jnp.asarray(offset, jnp.int32), (rows, q_len))
    columns = np.broadcast_to(np.arange(kv_len, dtype=np.int32), (rows, kv_len))
    until_diagonal: Mask = Positions(last, columns, left=None, right=0)
    if window is None:
        return until_diagonal
    return until_diagonal & Positions(last - jnp.asarray(window, jnp.int32) + np.int32(1), columns, left=0, right=None)


def _range(name: str, bounds: Any, batch: tuple[int, ...], length: int) -> Any:
    """int32 [rows, length] of [*batch, 1, length], in which leading sizes may be 1 or left out. Errors: ConfigError for
    ranges of heads."""
    if not is_array(bounds) or not jnp.issubdtype(bounds.dtype, jnp.integer):
        raise InputTypeError(f"mask.{name} is {getattr(bounds, 'dtype', a_type(bounds))}; wanted integers.")
    wide = (*batch, 1, length)
    shape = (1,) * (len(wide) - bounds.ndim) + tuple(bounds.shape)
    if len(shape) == len(wide) and shape[-2] != 1:
        raise ConfigError(
            f"mask.{name} has shape {tuple(bounds.shape)}, a range for each of {shape[-2]} heads; wanted one for all heads, "
            "[*batch, 1, n]: positions are those of rows. Pass a boolean mask instead."
        )
    if len(shape) != len(wide) or any(n not in (1, m) for n, m in zip(shape, wide, strict=True)):
        raise InputError(f"mask.{name} has shape {tuple(bounds.shape)}; wanted one that broadcasts to {wide}.")
    numpy: Any = np if isinstance(bounds, np.ndarray) else jnp
    return numpy.broadcast_to(bounds.reshape(shape), wide).reshape(math.prod(batch), length).astype(np.int32)


def _stored(name: str, x: Any, batch: tuple[int, ...]) -> tuple[Any, Any]:
    """(the stored array, its scale in attnops' form) of a QArray; an array has no scale. Errors: ConfigError."""
    if is_array(x) or not hasattr(x, "qvalue"):
        return x, None
    scale, shape = x.scale, tuple(x.qvalue.shape)
    if x.zero_point is not None:
        raise ConfigError(
            f"{name} is quantised with a zero point; wanted none: stored values are multiplied by the scale."
        )
    if scale.shape[-1] != 1 or any(n not in (1, m) for n, m in zip(scale.shape, shape, strict=True)):
        raise ConfigError(
            f"{name} has scales of shape {tuple(scale.shape)} for {shape}; wanted one per token, per head or per both, "
            "[*batch, kv, kv_heads, 1], where any size may be 1."
        )
    scale_batch = scale.shape[:-3]
    if any(n != 1 for n in scale_batch):
        scale = jnp.broadcast_to(scale, (*batch, *scale.shape[-3:]))
        scale_batch = batch
    return x.qvalue, scale.reshape(math.prod(scale_batch), *scale.shape[-3:])
