"""The backward passes: gradients of query, key and value from the weights, which are made anew from the lse.

Tiles are held as [keys, query rows]: lse and delta then lie along the lanes, as they are stored, and three of the five
products need no transposed operand. Fused, one pass over the forward's order makes all three gradients; the sums for the
keys of a kv head stay in VMEM meanwhile. Where those of all keys don't fit, the keys are taken in parts, a pass for each, and
the query's gradient is handed from one to the next. Apart, one pass by kv block makes the gradients of key and value, and
one by query block that of the query.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .forward import tile_product
from .frame import Frame, Input
from .schedule import FIRST, LAST, LIVE, PARTIAL
from .tile import HeadKey, Logits, Tile

__all__ = ["add_key_gradients", "add_query_gradient", "backward_kernel"]


def add_query_gradient(frame: Frame, q_padded: int, dim: int, dtype: Any, before: jax.Array | None = None) -> None:
    """Add d_query [batch, kv heads, group, q, dim] and its sum, which starts with what a pass over earlier keys made."""
    shape = (frame.batch, frame.heads.kv_heads, frame.heads.group, q_padded, dim)
    spec = frame.query_block(dim, "head_dim_minor")
    frame.outputs["d_query"] = (shape, dtype, spec)
    if before is not None:
        frame.inputs["d_query_before"] = Input(before, spec, "q")
    frame.scratch["q_sum"] = pltpu.VMEM((len(frame.heads.in_tile), frame.block_q, dim), jnp.float32)


def add_key_gradients(frame: Frame, kv_padded: int, dim: int, value_dim: int, dtype: Any, whole: bool) -> None:
    """Add d_key [batch, kv heads, kv, dim], d_value and their sums: of one block, or of all these keys."""
    for name, width in (("key", dim), ("value", value_dim)):
        shape = (frame.batch, frame.heads.kv_heads, kv_padded, width)
        spec = frame.key_block(width, "head_dim_minor")
        if whole:
            spec = frame.block((None, frame.heads.kv_tile, kv_padded, width), lambda s: (s.batch, s.kv_tile, 0, 0))
        frame.outputs[f"d_{name}"] = (shape, dtype, spec)
        rows = kv_padded if whole else frame.block_kv
        frame.scratch[f"{name}_sum"] = pltpu.VMEM((frame.heads.kv_tile, rows, width), jnp.float32)


def backward_kernel(
    refs: dict[str, Any],
    *,
    frame: Frame,
    logits: Logits,
    compute: int,
    layouts: tuple[str, str, str],
    stationary_weights: bool,
    first_block: int,
    query_scale: float,
) -> None:
    """One step of a backward pass; which gradients it makes is which sums it was given.

    first_block: the first kv block of the sums of the keys, where there are those of many. query_scale: what the query's
    gradient still wants, 1 where another pass goes on with it.
    stationary_weights: a gradient's product is made transposed. The matrix unit then holds the weights, which fill it, and
    the other factor, whose few columns would fill a part, streams past.
    """
    tile = Tile(frame, logits, refs, across=True)
    heads = frame.heads.in_tile
    q_time, k_time, v_time = (1 if layout == "seq_minor" else 0 for layout in layouts)
    of_query, of_keys = "q_sum" in refs, "key_sum" in refs
    fused = of_query and of_keys
    first, last = _ends(tile, frame, fused)

    def clear(*names: str) -> None:
        for name in names:
            refs[name][...] = jnp.zeros_like(refs[name])

    # A kv head's guards stand inside those of a query block: so does the clock tell what is done once a head.
    @pl.when(tile.says(FIRST) if of_query else first)
    def _start() -> None:
        if "d_query_before" in refs:
            for number, head in enumerate(heads):
                refs["q_sum"][number] = refs["d_query_before"][head]
        elif of_query:
            clear("q_sum")
        if fused:
            pl.when(first)(lambda: clear("key_sum", "value_sum"))
        elif of_keys:
            clear("key_sum", "value_sum")

    def visit(masked: bool) -> None:
        dropout = tile.dropout_keys()
        for start in range(0, frame.block_kv, compute):
            for number, head in enumerate(heads):
                differentiate(number, head, start, masked, dropout[number])

    def differentiate(number: int, head: tuple[int, int], start: int, masked: bool, dropout: HeadKey) -> None:
        kv_head, keys = head[0], slice(start, start + compute)
        query, d_out = refs["query"][head], refs["d_output"][head]
        key = refs["key"][kv_head, :, keys] if k_time else refs["key"][kv_head, keys, :]
        value = refs["value"][kv_head, :, keys] if v_time else refs["value"][kv_head, keys, :]
        x, capped = tile.weigh(tile_product(key, query, 1 - k_time, 1 - q_time), head, start, masked)
        p = logits.exp(x - refs["lse"][head])
        keep = tile.keep(dropout, start, compute)
        d_p = tile.dropped(tile_product(value, d_out, 1 - v_time, 1), keep)
        d_x = p * (d_p - refs["delta"][head])
        if capped is not None:
            d_x = d_x * (1.0 - capped * capped)
        d_x = d_x.astype(query.dtype)
        if of_keys:
            rows = pl.ds(start, compute)
            if fused:
                block = tile.step.kv_block - first_block
                rows = pl.ds(pl.multiple_of(block * frame.block_kv + start, compute), compute)
            p = tile.dropped(p, keep).astype(d_out.dtype)
            refs["value_sum"][kv_head, rows, :] += with_weights(p, d_out, 1, 0)
            refs["key_sum"][kv_head, rows, :] += with_weights(d_x, query, 1, q_time)
        if of_query:
            refs["q_sum"][number] += with_weights(d_x, key, 0, k_time)

    def with_weights(weights: jax.Array, x: jax.Array, axis: int, x_axis: int) -> jax.Array:
        if not stationary_weights:
            return tile_product(weights, x, axis, x_axis)
        return tile_product(x, weights, x_axis, axis).T

    live, partial = tile.says(LIVE), tile.says(PARTIAL)
    if frame.visits.some_full:
        pl.when(live & ~partial)(lambda: visit(masked=False))
    if frame.visits.some_partial:
        pl.when(partial)(lambda: visit(masked=True))

    def query_done() -> None:
        for number, head in enumerate(heads):
            refs["d_query"][head] = (refs["q_sum"][number] * query_scale).astype(refs["d_query"].dtype)

    def keys_done() -> None:
        refs["d_key"][...] = (refs["key_sum"][...] * logits.scale).astype(refs["d_key"].dtype)
        refs["d_value"][...] = refs["value_sum"][...].astype(refs["d_value"].dtype)

    # A list made on the device may end in visits without flags; there the last query block is written twice.
    @pl.when((tile.says(LAST) | last) if of_query else last)
    def _end() -> None:
        if of_query:
            query_done()
        if fused:
            pl.when(last)(keys_done)
        elif of_keys:
            keys_done()


def _ends(tile: Tile, frame: Frame, fused: bool) -> tuple[Any, Any]:
    """(first, last) step that adds to the sums of the keys: of a kv head if fused, else of a kv block."""
    of_group = frame.heads.group // frame.heads.group_tile
    group_tile = tile.step.group_tile
    if not fused:
        return tile.says(FIRST) & (group_tile == 0), tile.says(LAST) & (group_tile == of_group - 1)
    visit, count = pl.program_id(3), pl.num_programs(3)  # the fused pass goes by query block
    return (visit == 0) & (group_tile == 0), (visit == count - 1) & (group_tile == of_group - 1)


def row_numbers(x: jax.Array, fill: float, q_padded: int) -> jax.Array:
    """[batch, kv heads, group, q] as [batch, kv heads, group, 1, padded q]."""
    short = q_padded - x.shape[-1]
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * 3 + [(0, short, 0)])[..., None, :]
