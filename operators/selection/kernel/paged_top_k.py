"""The keys that each token of a ragged batch selects, of index keys in pages; on plain XLA.

Rows of sequences with one query are worked on together, each with its own pages; those of chunks block by block of one sequence.
The scores of such a block of rows stand in memory, never those of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt32

from ....errors import InputError, is_whole, shown
from ....page_layouts import LAYOUTS
from ...kernels.pages.page_layout import page_shape
from ...kernels.pages.paged import places
from ...kernels.pages.paged_checks import check_numbers, check_operands, int32, options_of
from ...kernels.pages.paged_mask import QueryRows
from ...kernels.pages.paged_step import Batch, PagedOperands, PagedStatic, Tiles, batch_of
from ...kernels.primitives import cut_along, loop, put
from ...kernels.varying import alike, vary, varying
from .best_places import best_places
from .index_scores import head_scores, index_scores
from .ordering import WORD, greatest, ordered, packed, positions_of

__all__ = ["PagedSelection", "merge_selections", "paged_top_k", "whole_words"]

_ROW_BYTES = 8 << 20  # the scores of a block of rows
_TILE_BYTES = 8 << 20  # the keys of a block of decoding rows; and the scores of each head, of a block of rows and keys
_MOST_ROWS, _MOST_KEYS = 64, 2048

Fold = Callable[[Callable[[Any, Any], Any], Any], Any]


class PagedSelection(NamedTuple):
    """positions int32 [tokens, k] in each token's sequence, ascending, then -1; order uint32 [tokens, k]: their scores as
    integers in the same order, 0 for none. Only part of a selection if other devices have pages of the same sequences."""

    positions: Int[Array, "tokens k"]
    order: UInt32[Array, "tokens k"]


def paged_top_k(
    index_query: Float[Array, "tokens index_heads dim"],
    key_pages: Shaped[Array, "pages copies page lanes"],
    weights: Float[Array, "tokens index_heads"],
    *,
    layout: str = "latent",
    cu_q_lens: Int[Array, " sequences_and_one"],
    kv_lens: Int[Array, " sequences"],
    page_table: Int[Array, "sequences width"],
    num_seqs: Int[Array, ...] | int,
    k: int,
    softmax_scale: float,
    causal: bool = True,
    sliding_window: tuple[int | None, int | None] | None = None,
    key_scale: Float[Array, ...] | float | None = None,
    max_q_len: int | None = None,
    platform: str | None = None,
    pages_a_block: int | None = None,
    block_q: int | None = None,
    page_stride: int = 1,
    page_shard: Int[Array, ""] | int = 0,
) -> PagedSelection:
    """Of each token's visible keys exactly the k with the greatest scores, as `top_k_keys` selects them; none for a token that
    belongs to no sequence.

    Pages and batch are those of `paged_attention`, with pages of layout latent. A token sees the keys that its position and the
    window show. Scales of int8 or fp8 pages: one number, [1], or one per token. With `page_stride` n and `page_shard` s only the
    keys of every n-th page from number s on are selected from; `merge_selections` merges those of all. Rows beyond `max_q_len` of
    a sequence select nothing. pages_a_block, block_q: what is worked on together; a block is a multiple of 32 keys.

    Errors: InputError and InputTypeError for shapes, dtypes and sizes that don't fit.
    """
    sizes = {"max_q_len": max_q_len, "pages_a_block": pages_a_block, "block_q": block_q, "page_stride": page_stride}
    check_numbers(softmax_scale, None, sizes)
    if not is_whole(k, 1):
        raise InputError(f"k is {shown(k)}; wanted an int of at least 1, the number of keys to select.")
    if not LAYOUTS[layout].values_in_keys:
        raise InputError(f"layout={layout!r}; wanted 'latent', whose pages hold one key of each token.")
    query, weights = jnp.asarray(index_query), jnp.asarray(weights)
    scale = None if key_scale is None else jnp.asarray(key_scale)
    operands = PagedOperands(
        query,
        jnp.asarray(key_pages),
        None,
        int32("cu_q_lens", cu_q_lens),
        int32("kv_lens", kv_lens),
        int32("page_table", page_table),
        int32("num_seqs", num_seqs),
        None,
        scale,
        scale,
    )
    if page_stride > 1:
        operands = operands._replace(shard=int32("page_shard", page_shard))
    check_operands(operands, layout)
    if weights.shape != query.shape[:2] or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise InputError(
            f"weights is {weights.dtype} {weights.shape}; wanted floats {query.shape[:2]}, [tokens, heads]."
        )
    operands = operands._replace(num_seqs=operands.num_seqs.reshape(()))
    pages, rows = _sizes(operands, layout, pages_a_block, block_q)
    static = PagedStatic(
        **options_of(softmax_scale, causal, sliding_window, None, max_q_len),
        platform=jax.default_backend() if platform is None else platform,
        pages_a_block=pages,
        pairs=1,
        large_blocks=0,
        block_q=rows,
        layout=layout,
        stride=page_stride,
    )
    operands, weights = alike((operands, weights))
    return _Selecting(static, lax.stop_gradient(operands), lax.stop_gradient(weights), k).selected()


def whole_words(page: int) -> int:
    """The least number of pages that hold a multiple of 32 keys; a block is a multiple of these."""
    return WORD // math.gcd(WORD, page)


def _sizes(operands: PagedOperands, layout: str, pages: int | None, rows: int | None) -> tuple[int, int]:
    """(pages per block, rows per block), those that are None by rule."""
    page = page_shape(layout, operands.key_pages, None, operands.query.shape[2]).page
    unit, width = whole_words(page), operands.page_table.shape[1]
    tokens, heads, _ = operands.query.shape
    if pages is not None and pages % unit:
        raise InputError(f"pages_a_block={pages} of {page} tokens; wanted a multiple of {unit}, whole words of bits.")
    if rows is None:
        most = tokens if operands.kv_lens.shape[0] < tokens else 1
        rows = max(1, min(most, _MOST_ROWS, _ROW_BYTES // (4 * width * page)))
    if pages is None:
        keys = min(_MOST_KEYS, max(128, _TILE_BYTES // (4 * heads * rows)), width * page)
        pages = -(-max(1, keys // page) // unit) * unit
    return pages, rows


class _Selecting:
    def __init__(self, static: PagedStatic, operands: PagedOperands, weights: jax.Array, k: int) -> None:
        self.static, self.operands, self.weights, self.k = static, operands, weights, k
        self.tiles = Tiles(static, operands, few_rows=None)
        self.batch: Batch = batch_of(operands)
        self.axes = varying((operands, weights))
        self.size = np.int32(static.pages_a_block)
        self.blocks = -(-self.tiles.width // static.pages_a_block)

    def selected(self) -> PagedSelection:
        """Of all tokens."""
        batch, most = self.batch, self.static.max_q_len
        seq, row, real = places(self.operands, batch)
        real = real if most is None else real & (row < most)
        at = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731
        if most == 1:
            found = jax.tree.map(at, self._single(batch.q_lens > 0))
        elif most is not None:
            found = self._chunks(batch.q_lens > 0)
        else:
            alone = batch.q_lens == 1
            single, chunks = jax.tree.map(at, self._single(alone)), self._chunks(batch.q_lens > 1)
            found = jax.tree.map(lambda a, b: jnp.where(at(alone)[:, None], a, b), single, chunks)
        return PagedSelection(jnp.where(real[:, None], found.positions, -1), jnp.where(real[:, None], found.order, 0))

    def _single(self, mine: jax.Array) -> PagedSelection:
        """[sequences, k]: of the first query of some sequences. Those of like lengths are worked on together."""
        batch, tiles, sequences = self.batch, self.tiles, len(self.batch.kv_lens)
        bytes_a_row = 4 * tiles.block * max(tiles.dim, self.operands.query.shape[1])
        rows = max(
            1, min(sequences, _MOST_ROWS, _TILE_BYTES // bytes_a_row, _ROW_BYTES // (4 * tiles.width * tiles.page))
        )
        longest_first = jnp.argsort(jnp.where(mine, -batch.kv_lens, 1)).astype(np.int32)
        in_use = jnp.sum(mine, dtype=np.int32)
        blocks = lax.div(in_use + np.int32(rows - 1), np.int32(rows))
        listed = jnp.pad(longest_first, (0, -sequences % rows))

        def of_block(n: Any, found: PagedSelection) -> PagedSelection:
            start = n * np.int32(rows)
            seq = cut_along(listed, start, rows)
            of = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731
            kv_len = jnp.where(start + jnp.arange(rows, dtype=np.int32) < in_use, of(batch.kv_lens), 0)
            position = jnp.where(kv_len > 0, kv_len - of(batch.q_lens), -1)
            token = of(batch.starts)
            query, weights = (x.at[token].get(mode="clip") for x in (self.operands.query, self.weights))
            first, end = tiles.range_of(position, position, kv_len)

            def score(block: Any) -> jax.Array:
                begin = first + block * self.size
                ids, mapped = tiles.slots(seq, begin, end)
                seen = tiles.seen(tiles.keys(begin), mapped, QueryRows(position[:, None], position[:, None]), kv_len)[
                    :, 0
                ]
                return self._scores(query, weights, tiles.stored_keys(ids)[:, 0], ids, seen)

            return self._put(found, score, start, first, end, rows)

        return jax.tree.map(
            lambda x: jnp.zeros_like(x, shape=(sequences, self.k)).at[longest_first].set(x[:sequences]),
            loop(0, blocks, of_block, self._nothing(len(listed))),
        )

    def _chunks(self, mine: jax.Array) -> PagedSelection:
        """[tokens, k]: of the rows of some sequences; others hold any numbers."""
        batch, tiles, tokens = self.batch, self.tiles, self.operands.query.shape[0]
        most = self.static.max_q_len
        rows = self.static.block_q if most is None else min(self.static.block_q, most)
        blocks = jnp.where(mine, lax.div(batch.q_lens + np.int32(rows - 1), np.int32(rows)), 0)
        ends = jnp.cumsum(blocks, dtype=np.int32)
        query, weights = (
            jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1)) for x in (self.operands.query, self.weights)
        )

        def of_block(n: Any, found: PagedSelection) -> PagedSelection:
            seq = jnp.sum(ends <= n, dtype=np.int32)
            of = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731
            first_row = (n - of(ends - blocks)) * np.int32(rows)
            start, q_len, kv_len = of(batch.starts) + first_row, of(batch.q_lens), of(batch.kv_lens)
            row = first_row + jnp.arange(rows, dtype=np.int32)
            positions = jnp.where(row < q_len, kv_len - q_len + row, -1)
            q, w = (cut_along(x, start, rows) for x in (query, weights))
            first, end = tiles.range_of(positions[0], positions.max(), kv_len)

            def score(block: Any) -> jax.Array:
                begin = first + block * self.size
                ids, mapped = tiles.slots(seq, begin, end)
                seen = tiles.seen(tiles.keys(begin), mapped, QueryRows(positions, positions), kv_len)
                return self._scores(q, w, tiles.stored_keys(ids)[0], ids, seen)

            return self._put(found, score, start, first, end, rows)

        return jax.tree.map(lambda x: x[:tokens], loop(0, ends[-1], of_block, self._nothing(tokens + rows)))

    def _nothing(self, rows: int) -> PagedSelection:
        return PagedSelection(
            vary(jnp.full((rows, self.k), -1, np.int32), self.axes), self._zeros((rows, self.k), jnp.uint32)
        )

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return vary(jnp.zeros(shape, dtype), self.axes)

    def _scores(self, query: Any, weights: Any, keys: Any, ids: Any, seen: jax.Array) -> jax.Array:
        scale = self.tiles.key_scale(ids)
        if scale is not None:
            scale = jnp.broadcast_to(scale.reshape(*scale.shape[:-3], -1), keys.shape[:-1])
        return ordered(index_scores(head_scores(query, keys, self.static.scale, scale), weights), seen)

    def _put(
        self, found: PagedSelection, score: Callable[[Any], jax.Array], start: Any, first: Any, end: Any, rows: int
    ) -> PagedSelection:
        """`found` with the best of a block of rows, whose pages are `first` to `end`, of all rows or of each."""
        tiles, page = self.tiles, np.int32(self.tiles.page)
        trips = lax.div(end - first + (self.size - 1), self.size).max()

        def fold(step: Callable[[Any, Any], Any], carry: Any) -> Any:
            return loop(0, trips, step, carry)

        best, _, order = best_places(fold, score, self.k, (self.blocks, rows, tiles.block), self._zeros)
        used, place = best >= 0, jnp.maximum(best, 0)
        number = lax.expand_dims(jnp.broadcast_to(first, (rows,)), (1,)) + lax.div(place, page)
        if self.operands.shard is not None:
            number = number * np.int32(self.static.stride) + self.operands.shard
        positions = jnp.where(used, number * page + lax.rem(place, page), -1)
        keys = np.int32(tiles.block)
        of_row = jnp.arange(rows, dtype=np.int32)[:, None]
        chosen = order.at[lax.div(place, keys), of_row, lax.rem(place, keys)].get(mode="promise_in_bounds")
        return PagedSelection(
            put(found.positions, positions, (start, 0)),
            put(found.order, jnp.where(used, chosen, jnp.uint32(0)), (start, 0)),
        )


def merge_selections(parts: Sequence[PagedSelection]) -> PagedSelection:
    """The selection of all keys from those of parts of them, exactly: what one part leaves out, all of them would."""
    k = parts[0].positions.shape[1]
    joined = (jnp.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    positions, order = lax.sort(tuple(joined), dimension=1, num_keys=1)
    short = -positions.shape[1] % WORD
    at = positions_of(packed(jnp.pad(greatest(order, k), ((0, 0), (0, short)))), k)
    found = (jnp.take_along_axis(x, jnp.maximum(at, 0), axis=1, mode="promise_in_bounds") for x in (positions, order))
    positions, order = found
    return PagedSelection(jnp.where(at >= 0, positions, -1), jnp.where(at >= 0, order, jnp.uint32(0)))
