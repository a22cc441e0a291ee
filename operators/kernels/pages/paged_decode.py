"""Decoding rows against pages: a flat list of live (sequence, block of pages) pairs, a few of them at a time.

The loop's trip count is the number of live blocks in the batch, so a long sequence costs only its own blocks. The
list is never stored: pair n is looked up in the running sum of the sequences' blocks. Adjacent pairs belong
to adjacent sequences, once those without live pages are left out; so a step merges its sums into one window of the
carry, by a small selection, without a scatter.

A single sequence has no neighbours to share a step with. Most of it goes in blocks of more pages, and what they leave in others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..lse import subtracted
from ..primitives import counted, cut_along, loop, put
from ..varying import vary, varying
from .paged_step import Batch, PagedOperands, PagedStatic, Sums, Tiles, finish

__all__ = ["DecodePairs", "attend_decode", "decode_pairs"]


class DecodePairs(NamedTuple):
    """The live pairs of a batch; int32 [S] each, and their number."""

    first_page: jax.Array
    end_page: jax.Array
    begin: jax.Array  # start of a sequence's pairs
    end: jax.Array
    rank: jax.Array  # a sequence's place among those that have pairs
    total: jax.Array


def decode_pairs(tiles: Tiles, batch: Batch, selected: jax.Array, done: jax.Array | None = None) -> DecodePairs:
    """Which pages the queries of each selected sequence can see, in blocks; from page `done` on if it is given."""
    spans = tiles.operands.spans
    least = None if spans is None else spans.least
    first, end = tiles.range_of(batch.kv_lens - batch.q_lens, batch.kv_lens - 1, batch.kv_lens, least)
    first = first if done is None else done
    size = np.int32(tiles.static.pages_a_block)
    blocks = jnp.where(selected, lax.div(end - first + (size - 1), size), 0)
    ends = jnp.cumsum(blocks, dtype=np.int32)
    rank = jnp.cumsum(blocks > 0, dtype=np.int32) - 1
    return DecodePairs(first, end, ends - blocks, ends, rank, ends[-1])


def _whole_blocks(tiles: Tiles, pairs: DecodePairs) -> DecodePairs:
    """The same pages of a single sequence, as far as they fill these tiles' blocks."""
    size = np.int32(tiles.static.pages_a_block)
    count = jnp.where(pairs.total > 0, lax.div(pairs.end_page - pairs.first_page, size), 0)
    end = jnp.where(pairs.total > 0, pairs.first_page + count * size, pairs.first_page)
    return DecodePairs(pairs.first_page, end, jnp.zeros_like(count), count, pairs.rank, count[-1])


def attend_decode(
    static: PagedStatic, operands: PagedOperands, batch: Batch, selected: jax.Array, q_len: int
) -> tuple[jax.Array, jax.Array]:
    """(output [S, q_len, heads, value_dim], lse [S, q_len, heads]) of each selected sequence's first `q_len` queries."""
    tiles = Tiles(static, operands, few_rows=q_len)
    pairs = decode_pairs(tiles, batch, selected)
    sequences, pair_count = len(batch.kv_lens), static.pairs
    axes = varying(operands)
    index = counted(batch.starts, q_len)
    all_rows = tiles.rows_of(operands.query.at[index].get(mode="clip"))
    shape = all_rows.shape[1:-1]  # kv heads, rows
    slot_count = sequences + pair_count - 1
    start = Sums(
        jnp.zeros((slot_count, *shape, tiles.value_dim), np.float32),
        jnp.full((slot_count, *shape), -jnp.inf, np.float32),
        jnp.zeros((slot_count, *shape), np.float32),
    )

    def step(tiles: Tiles, pairs: DecodePairs, n: Any, carry: Sums) -> Sums:
        size = np.int32(tiles.static.pages_a_block)
        number = n * np.int32(pair_count) + jnp.arange(pair_count, dtype=np.int32)
        real = number < pairs.total
        seq = jnp.sum(pairs.end[None, :] <= number[:, None], axis=1, dtype=np.int32)
        last = jnp.sum(pairs.end < pairs.total, dtype=np.int32)  # stands for a pair beyond the end, masked
        seq = jnp.where(real, seq, last)
        of = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731
        number = jnp.where(real, number, pairs.total - 1)
        first = of(pairs.first_page) + (number - of(pairs.begin)) * size
        ids, mapped = tiles.slots(seq, first, of(pairs.end_page))
        kv_len = of(batch.kv_lens)
        queries = tiles.queries(batch, seq, jnp.arange(q_len, dtype=np.int32)[None])
        keys = tiles.keys(first)
        seen = tiles.seen(keys, mapped & real[:, None], queries, kv_len)

        stored = tiles.stored_keys(ids)
        x = tiles.logits(of(all_rows), stored, tiles.key_scale(ids), seen, seq, tiles.places(queries, keys, seq))
        rank = of(pairs.rank)
        place = rank - rank[0]
        old = jax.tree.map(lambda c: cut_along(c, rank[0], pair_count), carry)
        belongs = place[None] == jnp.arange(pair_count, dtype=np.int32)[:, None]  # [places in the window, pairs]
        peak = jnp.maximum(old.peak, _chosen(belongs, x.max(axis=-1), -jnp.inf).max(axis=1))
        shift = subtracted(peak)
        p = tiles.exp2(x - shift.at[place].get(mode="promise_in_bounds")[..., None])
        shrink = jnp.exp2(old.peak - shift)
        acc = old.acc * shrink[..., None] + _chosen(belongs, tiles.values(p, stored, ids, seen), 0).sum(axis=1)
        total = old.total * shrink + _chosen(belongs, p.sum(axis=-1), 0).sum(axis=1)
        window = Sums(acc, peak, total)
        return jax.tree.map(lambda c, part: put(c, part, (rank[0], *[0] * (c.ndim - 1))), carry, window)

    def add(tiles: Tiles, pairs: DecodePairs, sums: Sums) -> Sums:
        trips = lax.div(pairs.total + np.int32(pair_count - 1), np.int32(pair_count))
        return loop(0, trips, partial(step, tiles, pairs), sums)

    sums, rest = jax.tree.map(lambda x: vary(x, axes), start), pairs
    if static.large_blocks:
        large = Tiles(replace(static, pages_a_block=static.large_blocks), operands, few_rows=q_len)
        whole = _whole_blocks(large, pairs)
        sums, rest = add(large, whole, sums), decode_pairs(tiles, batch, selected, whole.end_page)
    sums = add(tiles, rest, sums)
    alive = pairs.end > pairs.begin
    mine = Sums(*(x.at[jnp.maximum(pairs.rank, 0)].get(mode="promise_in_bounds") for x in sums))
    lone = lambda x, empty: jnp.where(alive.reshape(-1, *[1] * (x.ndim - 1)), x, empty)  # noqa: E731
    mine = Sums(lone(mine.acc, 0), lone(mine.peak, -jnp.inf), lone(mine.total, 0))
    sinks = None if operands.sinks is None else operands.sinks.reshape(tiles.kv_heads, 1, tiles.group)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, (tiles.kv_heads, q_len, tiles.group)).reshape(tiles.kv_heads, -1)
    output, lse = finish(mine, sinks, operands.query.dtype)
    return tiles.heads_of(output, q_len), tiles.heads_of(lse[..., None], q_len)[..., 0]


def _chosen(belongs: jax.Array, parts: jax.Array, otherwise: float) -> jax.Array:
    """[places, pairs, ...]: a pair's part where its sequence is, otherwise a number. A product with 0 would let NaN through."""
    return jnp.where(belongs.reshape(*belongs.shape, *[1] * (parts.ndim - 1)), parts[None], np.float32(otherwise))
