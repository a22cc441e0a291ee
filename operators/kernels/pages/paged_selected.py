"""Attention of each token to a list of its sequence's keys: only those are gathered from their pages.

Blocks of tokens are worked on one after the other, so that the gathered keys of few tokens are in memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....page_layouts import LAYOUTS
from ...vanilla.kernel.cpu_tuning import as_bits, from_bits
from ..lse import subtracted
from ..primitives import cut_along, loop, put
from ..varying import vary, varying
from .paged_mask import QueryRows
from .paged_step import Batch, PagedOperands, PagedStatic, Sums, Tiles, finish

__all__ = ["attend_selected", "places_of", "seen_places"]

_BLOCK_BYTES = 4 << 20  # of gathered keys, in float32


def attend_selected(
    static: PagedStatic, operands: PagedOperands, batch: Batch, seq: jax.Array, row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(output [T, heads, value_dim], lse [T, heads]) over the keys at operands.selected [T, n], positions in a token's sequence.

    seq, row: each token's sequence, and its place there. A position that the token can't see, or that has no page, is no key.
    """
    assert operands.selected is not None
    tiles = Tiles(static, operands, few_rows=1)
    tiles.joint_heads = False  # keys are gathered by token
    tokens, heads, _ = operands.query.shape
    n = operands.selected.shape[1]
    size = max(1, min(tokens, _BLOCK_BYTES // max(1, 4 * n * tiles.kv_heads * tiles.dim)))
    sinks = None if operands.sinks is None else operands.sinks.reshape(tiles.kv_heads, tiles.group)
    rows, axes = tiles.rows_of(operands.query[:, None]), varying(operands)

    def of_block(block: Any, outputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The last block begins earlier and repeats some tokens.
        start = jnp.minimum(block * np.int32(size), np.int32(tokens - size))
        part = lambda x: cut_along(x, start, size)  # noqa: E731
        sequence, selected = part(seq), part(operands.selected)
        ids, slot, seen, queries = seen_places(tiles, batch, sequence, part(row), selected)
        seen = seen[:, None]
        key, value = _gathered(tiles, ids, slot)
        scale = _scales(tiles, operands.key_scale, ids, slot)
        x = tiles.logits(part(rows), key, scale, seen, sequence, tiles.places(queries, selected, sequence))
        peak = x.max(axis=-1)
        p = tiles.exp2(x - subtracted(peak)[..., None])
        alive, total = seen.any(axis=-2)[..., None, :], p.sum(axis=-1)
        if operands.value_scale is not None:
            of_values = _scales(tiles, operands.value_scale, ids, slot)
            assert of_values is not None
            p = tiles.scaled(p, of_values, alive)
        sums = Sums(tiles.weighted(p.astype(tiles.dtype), value, alive), peak, total)
        output, lse = finish(sums, sinks, operands.query.dtype)
        output, lse = tiles.heads_of(output, 1)[:, 0], tiles.heads_of(lse[..., None], 1)[:, 0, :, 0]
        return put(outputs[0], output, (start, 0, 0)), put(outputs[1], lse, (start, 0))

    empty = (
        jnp.zeros((tokens, heads, tiles.value_dim), operands.query.dtype),
        jnp.full((tokens, heads), -jnp.inf, np.float32),
    )
    return loop(0, np.int32(-(-tokens // size)), of_block, jax.tree.map(lambda x: vary(x, axes), empty))


def seen_places(
    tiles: Tiles, batch: Batch, sequence: jax.Array, row: jax.Array, selected: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, QueryRows]:
    """(page ids, places in the page, whether the token sees such a key here), [tokens, n] each, and the tokens as queries.
    sequence, row [tokens]: each token's sequence, and its place there."""
    queries = tiles.queries(batch, sequence, row[:, None])
    ids, slot, there = places_of(tiles, sequence, selected)
    lengths = batch.kv_lens.at[sequence].get(mode="promise_in_bounds")
    return ids, slot, tiles.visible(selected, there, queries, lengths)[:, 0], queries


def places_of(tiles: Tiles, sequence: jax.Array, selected: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(page ids, places in the page, whether there is such a key here), [tokens, n] each; ids are in range for all."""
    static, page = tiles.static, np.int32(tiles.page)
    at = jnp.maximum(selected, 0)
    number, slot = lax.div(at, page), lax.rem(at, page)
    there = selected >= 0
    if tiles.operands.shard is not None:  # the table has every stride-th page
        stride = np.int32(static.stride)
        there &= lax.rem(number, stride) == tiles.operands.shard
        number = lax.div(number, stride)
    there &= number < tiles.width
    ids = tiles.operands.page_table.at[sequence[:, None], jnp.minimum(number, np.int32(tiles.width - 1))].get(
        mode="promise_in_bounds"
    )
    there &= (ids >= 0) & (ids < tiles.pages)
    return jnp.where(there, ids, 0), slot, there


def _gathered(tiles: Tiles, ids: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(keys, values) [tokens, kv heads, n, dim]."""
    form, operands = LAYOUTS[tiles.static.layout], tiles.operands
    pages, ids_of_all, slots = lax.optimization_barrier(
        ((operands.key_pages, operands.value_pages, operands.rope_pages), ids.reshape(-1), slot.reshape(-1))
    )

    def tokens(x: jax.Array | None) -> jax.Array | None:
        """Each gathered token as a page of its own."""
        if x is None:
            return None
        bits = as_bits(x, tiles.static.platform).at[form.places(ids_of_all, slots)].get(mode="promise_in_bounds")
        return from_bits(jnp.expand_dims(bits, 2 if form.heads_first else 1), x.dtype)

    key, value = (
        x.reshape(*ids.shape, *x.shape[2:]).swapaxes(1, 2).astype(tiles.dtype)
        for x in form.separate(tokens(pages[0]), tokens(pages[1]), tiles.dim - tiles.rope_dim, tiles.value_dim)
    )
    if (stored := tokens(pages[2])) is not None:
        rope = stored[..., : tiles.rope_dim].reshape(*ids.shape, *stored.shape[1:2], tiles.rope_dim)
        key = jnp.concatenate([key, rope.swapaxes(1, 2).astype(tiles.dtype)], -1)
    return key, value


def _scales(tiles: Tiles, scale: jax.Array | None, ids: jax.Array, slot: jax.Array) -> jax.Array | None:
    """The scale of gathered keys or values in the shape that multiplies logits: [kv heads, 1, 1] or [tokens, kv heads, 1, n]."""
    if scale is None:
        return None
    if scale.ndim < 3:
        return jnp.broadcast_to(scale.astype(np.float32), (tiles.kv_heads,))[:, None, None]
    form = LAYOUTS[tiles.static.layout]
    rows = scale.at[form.places(ids, slot)].get(mode="promise_in_bounds")  # [tokens, n, kv heads]
    return rows.astype(np.float32).swapaxes(1, 2)[:, :, None]
