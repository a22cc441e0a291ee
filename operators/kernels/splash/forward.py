"""The forward pass: online softmax over the live tiles of each query block.

int8 and fp8 keys and values come as they are and get the query's dtype here, exactly. The scale of a key goes into its
logits, that of a value on the value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..precision import exact
from .frame import Frame
from .schedule import FIRST, LAST, LIVE, PARTIAL
from .tile import HeadKey, Logits, Tile

__all__ = ["forward_kernel", "forward_outputs", "forward_scratch", "tile_product"]

_LANES = 128
# The peak of a row that has seen nothing: finite, so that the exponential of -inf minus it is 0 and not NaN.
_NOTHING = float(jnp.finfo(jnp.float32).min)


def tile_product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Matrix product over an axis of each, summed in float32."""
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact(a.dtype), preferred_element_type=jnp.float32)


def forward_outputs(frame: Frame, q_padded: int, value_dim: int, dtype: Any, normalised: bool) -> None:
    """Add the output [batch, kv heads, group, q, value dim] and the lse [batch, kv heads, group, 1, q].

    Without `normalised` the output is the weighted sum in float32, and "divisor", laid out as the lse, what to divide it by.
    """
    shape = (frame.batch, frame.heads.kv_heads, frame.heads.group)
    out = frame.query_block(value_dim, "head_dim_minor")
    frame.outputs["output"] = ((*shape, q_padded, value_dim), dtype if normalised else jnp.float32, out)
    for name in ("lse",) if normalised else ("lse", "divisor"):
        frame.outputs[name] = ((*shape, 1, q_padded), jnp.float32, frame.row_block())


def forward_scratch(frame: Frame, value_dim: int) -> None:
    """Add each row's peak and sum, repeated over the lanes, and the weighted sum of values."""
    heads = len(frame.heads.in_tile)
    frame.scratch["peak"] = pltpu.VMEM((heads, frame.block_q, _LANES), jnp.float32)
    frame.scratch["total"] = pltpu.VMEM((heads, frame.block_q, _LANES), jnp.float32)
    frame.scratch["sum"] = pltpu.VMEM((heads, frame.block_q, value_dim), jnp.float32)


def forward_kernel(
    refs: dict[str, Any],
    *,
    frame: Frame,
    logits: Logits,
    compute: int,
    compute_in: int,
    layouts: tuple[str, str, str],
    normalised: bool,
    sum_by_product: bool,
) -> None:
    """One step: `compute` keys in a product with the queries, `compute_in` of them through the exponential at a time.

    sum_by_product: the weights of a row are summed by the product with the values, beside which ones stand.
    """
    tile = Tile(frame, logits, refs, across=False)
    peak, total, weighted = refs["peak"], refs["total"], refs["sum"]
    heads = frame.heads.in_tile
    q_time, k_time, v_time = (1 if layout == "seq_minor" else 0 for layout in layouts)

    @pl.when(tile.says(FIRST))
    def _start() -> None:
        weighted[...] = jnp.zeros_like(weighted)
        if "sinks" not in refs:
            peak[...] = jnp.full_like(peak, _NOTHING)
            total[...] = jnp.zeros_like(total)
            return
        for number, head in enumerate(heads):  # a sink is a key without a value
            sink = jnp.maximum(refs["sinks"][tile.head(head)] * logits.unit, _NOTHING)
            peak[number] = jnp.full(peak.shape[1:], sink, jnp.float32)
            total[number] = jnp.full(total.shape[1:], jnp.where(sink > _NOTHING, 1.0, 0.0), jnp.float32)

    def visit(masked: bool) -> None:
        dropout = tile.dropout_keys()
        for start in range(0, frame.block_kv, compute):
            for number, head in enumerate(heads):
                attend(number, head, start, masked, dropout[number])

    def attend(number: int, head: tuple[int, int], start: int, masked: bool, dropout: HeadKey) -> None:
        keys = slice(start, start + compute)
        key = refs["key"][head[0], :, keys] if k_time else refs["key"][head[0], keys, :]
        query = refs["query"][head]
        raw = tile_product(query, key.astype(query.dtype), 1 - q_time, 1 - k_time)
        x, _ = tile.weigh(raw, head, start, masked)
        old_peak = peak[number]
        new_peak = jnp.maximum(old_peak, x.max(axis=1, keepdims=True))
        shrink = logits.exp(old_peak - new_peak)
        dim = weighted.shape[-1]
        step = row_sum = None
        for inner in range(0, compute, compute_in):
            p = logits.exp(x[:, inner : inner + compute_in] - jnp.tile(new_peak, (1, compute_in // _LANES)))
            if not sum_by_product:
                part = p.sum(axis=1, keepdims=True)
                row_sum = part if row_sum is None else row_sum + part
            p = tile.dropped(p, tile.keep(dropout, start + inner, compute_in))
            keys = slice(start + inner, start + inner + compute_in)
            value = refs["value"][head[0], :, keys] if v_time else refs["value"][head[0], keys, :]
            if "value_scale" in refs:
                # Not on the weights: there are more of them, and their sum may come from the same product.
                scale = refs["value_scale"][head[0], :, keys]
                if not v_time:  # as a whole square: a lone column would be spread over the lanes at thrice the cost
                    scale = _wide(jnp.broadcast_to(scale, (_LANES, compute_in)).T, value.shape[-1])
                value = value.astype(jnp.float32) * scale
            value = value.astype(query.dtype)
            if sum_by_product:
                ones = (_LANES, compute_in) if v_time else (compute_in, _LANES)
                value = jnp.concatenate([value, jnp.ones(ones, value.dtype)], axis=1 - v_time)
            part = tile_product(p.astype(value.dtype), value, 1, v_time)
            step = part if step is None else step + part
        assert step is not None
        peak[number] = new_peak
        total[number] = total[number] * shrink + (step[:, dim:] if row_sum is None else row_sum)
        weighted[number] = weighted[number] * _wide(shrink, dim) + step[:, :dim]

    live, partial = tile.says(LIVE), tile.says(PARTIAL)
    if frame.visits.some_full:
        pl.when(live & ~partial)(lambda: visit(masked=False))
    if frame.visits.some_partial:
        pl.when(partial)(lambda: visit(masked=True))

    @pl.when(tile.says(LAST))
    def _end() -> None:
        for number, head in enumerate(heads):
            row_total = total[number]
            dead = row_total == 0
            safe = jnp.where(dead, 1.0, row_total)
            out = weighted[number]
            if normalised:
                out = out / _wide(safe, out.shape[-1])
            else:
                refs["divisor"][head] = safe.T[:1]
            refs["output"][head] = out.astype(refs["output"].dtype)
            log = jnp.log2(safe) if logits.base2 else jnp.log(safe)
            lse = jnp.where(dead, -jnp.inf, (peak[number] + log) * (1 / logits.unit))
            refs["lse"][head] = lse.T[:1]


def _wide(rows: jax.Array, width: int) -> jax.Array:
    """One number a row, repeated over 128 lanes, as wide as the head is."""
    if width <= _LANES:
        return rows[:, :width]
    return jnp.tile(rows, (1, -(-width // _LANES)))[:, :width]
