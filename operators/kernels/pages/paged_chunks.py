"""Prefill chunks against pages: the rows in blocks of one sequence each, every block against the pages that it sees.

How many blocks there are, whose they are and which pages they see is computed on the device. A block's last rows may be
another sequence's: they see nothing here, and their results are overwritten by the block that they belong to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...vanilla.kernel.cpu_tuning import as_bits, from_bits
from ..lse import subtracted
from ..primitives import cut_along, loop, put
from ..varying import vary, varying
from .paged_step import Batch, PagedOperands, PagedStatic, Sums, Tiles, finish

__all__ = ["attend_chunks"]


def attend_chunks(
    static: PagedStatic, operands: PagedOperands, batch: Batch, selected: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(output [T, heads, value_dim], lse [T, heads]) of the selected sequences' rows; others hold arbitrary finite values or
    -inf."""
    tiles = Tiles(static, operands, few_rows=None)
    tokens, heads, _ = operands.query.shape
    size, platform, dtype = static.block_q, static.platform, operands.query.dtype
    axes = varying(operands)
    blocks = jnp.where(selected, lax.div(batch.q_lens + np.int32(size - 1), np.int32(size)), 0)
    ends = jnp.cumsum(blocks, dtype=np.int32)
    query = jnp.pad(operands.query, ((0, size), (0, 0), (0, 0)))
    shape = tiles.kv_heads, size * tiles.group
    sinks = None
    if operands.sinks is not None:
        sinks = operands.sinks.reshape(tiles.kv_heads, 1, tiles.group)
        sinks = jnp.broadcast_to(sinks, (tiles.kv_heads, size, tiles.group)).reshape(shape)

    def of_block(n: Any, outputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seq = jnp.sum(ends <= n, dtype=np.int32)
        of = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731
        first_row = (n - of(ends - blocks)) * np.int32(size)
        start, kv_len = of(batch.starts) + first_row, of(batch.kv_lens)
        queries = tiles.queries(batch, seq, first_row + jnp.arange(size, dtype=np.int32))
        fixed_query = lax.optimization_barrier((query, start))[0]
        rows = tiles.rows_of(from_bits(cut_along(as_bits(fixed_query, platform), start, size), dtype))
        first_page, end_page = tiles.pages_of(queries, kv_len)

        def of_pages(m: Any, sums: Sums) -> Sums:
            first = first_page + m * np.int32(static.pages_a_block)
            ids, mapped = tiles.slots(seq, first, end_page)
            keys = tiles.keys(first)
            seen = tiles.seen(keys, mapped, queries, kv_len)
            stored = tiles.stored_keys(ids)
            x = tiles.logits(rows, stored, tiles.key_scale(ids), seen, seq, tiles.places(queries, keys, seq))
            peak = jnp.maximum(sums.peak, x.max(axis=-1))
            shift = subtracted(peak)
            p = tiles.exp2(x - shift[..., None])
            shrink = jnp.exp2(sums.peak - shift)
            acc = sums.acc * shrink[..., None] + tiles.values(p, stored, ids, seen)
            return Sums(acc, peak, sums.total * shrink + p.sum(axis=-1))

        begin = Sums(
            jnp.zeros((*shape, tiles.value_dim), np.float32),
            jnp.full(shape, -jnp.inf, np.float32),
            jnp.zeros(shape, np.float32),
        )
        pages_a_block = np.int32(static.pages_a_block)
        trips = lax.div(end_page - first_page + (pages_a_block - 1), pages_a_block)
        sums = loop(0, trips, of_pages, jax.tree.map(lambda x: vary(x, axes), begin))
        output, lse = finish(sums, sinks, dtype)
        output = as_bits(tiles.heads_of(output, size), platform)
        lse = tiles.heads_of(lse[..., None], size)[..., 0]
        return put(outputs[0], output, (start, 0, 0)), put(outputs[1], lse, (start, 0))

    bits = jnp.zeros((tokens + size, heads, tiles.value_dim), dtype)
    empty = as_bits(bits, platform), jnp.full((tokens + size, heads), -jnp.inf, np.float32)
    output, lse = loop(0, ends[-1], of_block, jax.tree.map(lambda x: vary(x, axes), empty))
    return from_bits(output, dtype)[:tokens], lse[:tokens]
