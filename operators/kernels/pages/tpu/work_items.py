"""A kernel's work list, made on the device: work items of some rows of one sequence, those that see a page."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..paged_mask import chunk_start
from ..paged_step import Batch, PagedOperands
from .geometry import Geometry, Options
from .row_numbers import numbers_of_items, of_rows

__all__ = [
    "FIELDS",
    "FIRST_PAGE",
    "Chunks",
    "OwnPages",
    "WorkItem",
    "chunk_items",
    "compact",
    "decode_items",
    "max_chunk_items",
]

FIELDS, FIRST_PAGE = 7, 3  # words per work item, and the word where its pages begin


class WorkItem(NamedTuple):
    """Numbers of a work item, int32. row: where it begins in the kernel's query. position: of that row among the
    keys. first, end: pages of its sequence that it sees; keys: how many the sequence has. sound: whether all these pages' ids
    are in range."""

    seq: Any
    row: Any
    position: Any
    first: Any
    end: Any
    keys: Any
    sound: Any

    @classmethod
    def read(cls, words: Any, number: Any) -> WorkItem:
        """Read a work item from scalar memory."""
        return cls(*(words[number * FIELDS + i] for i in range(FIELDS)))


class Chunks(NamedTuple):
    """Units of up to `queries_per_block` rows each, and where to find a token's row."""

    words: jax.Array
    listed: jax.Array
    source: jax.Array  # [packed]: the token of each row of the packed query
    place: jax.Array  # [tokens]: its inverse
    item: jax.Array  # [tokens]: of the compacted list
    row: jax.Array  # [tokens]: within the work item
    in_list: jax.Array  # [tokens]: whether its work item is in the list
    numbers: jax.Array | None  # [work items, rows of a block, 128]: see row_numbers.py


def decode_items(
    geometry: Geometry, options: Options, operands: PagedOperands, batch: Batch, selected: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(words, count, bool [sequences] whether in the list) of sequences with one row each."""
    own = OwnPages(geometry, options, operands.shard)
    keys = jnp.minimum(batch.kv_lens, own.most_keys)
    position = batch.kv_lens - batch.q_lens
    first, end = _pages(own, options, position, position, keys)
    sound = _sound(own, operands.page_table, first, keys)
    seq = jnp.arange(geometry.sequences, dtype=np.int32)
    listed = selected & (end > first)
    words, count, _ = compact(listed, WorkItem(seq, batch.starts, position, first, end, keys, sound))
    return words, count, listed


def max_chunk_items(geometry: Geometry, options: Options) -> tuple[int, int]:
    """(work items, rows of the packed query) that chunks of two or more rows can make at most; with spans, of one or more."""
    tokens, block = geometry.tokens, options.queries_per_block
    chunks = max(1, min(geometry.sequences, tokens if options.spans else tokens // 2))
    align = row_alignment(geometry)
    items = max(1, min(tokens, tokens // block + chunks))
    return items, -(-(tokens + chunks * (align - 1)) // align) * align + block


def row_alignment(geometry: Geometry) -> int:
    """Chunks begin at multiples of this in the packed query: copies move whole tiles of either dtype."""
    if geometry.queries_first:
        return 1
    return 16 if geometry.dtype.itemsize < 4 else 8


def chunk_items(
    geometry: Geometry,
    options: Options,
    operands: PagedOperands,
    batch: Batch,
    selected: jax.Array,
    token_seq: jax.Array,
    token_row: jax.Array,
) -> Chunks:
    """Units of the selected sequences; token_seq, token_row: for each row of the query, its sequence and its place there."""
    block, align = np.int32(options.queries_per_block), np.int32(row_alignment(geometry))
    max_units, packed = max_chunk_items(geometry, options)
    rows = batch.q_lens if options.max_q_len is None else jnp.minimum(batch.q_lens, np.int32(options.max_q_len))
    rows = jnp.where(selected, rows, 0)
    padded = lax.div(rows + (align - 1), align) * align
    starts = jnp.cumsum(padded, dtype=np.int32) - padded
    blocks = lax.div(rows + (block - 1), block)
    ends = jnp.cumsum(blocks, dtype=np.int32)

    number = jnp.arange(max_units, dtype=np.int32)
    seq = jnp.minimum(jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=np.int32), geometry.sequences - 1)
    of = lambda x: x.at[seq].get(mode="promise_in_bounds")  # noqa: E731
    at = (number - of(ends - blocks)) * block
    own_pages = OwnPages(geometry, options, operands.shard)
    keys = jnp.minimum(of(batch.kv_lens), own_pages.most_keys)
    begin = of(batch.kv_lens) - of(batch.q_lens)
    position = begin + at
    last = position + jnp.minimum(of(rows) - at, block) - 1
    if (tree := operands.draft_tree) is not None:  # its rows are at any depth
        position = jnp.where(of(tree.used), begin, position)
    spans = operands.spans
    own = None if spans is None else of_rows(spans, of(batch.starts) + at, of(batch.starts) + of(rows), options)
    least, most = (None, None) if own is None else (own[0].min(axis=1), own[1].max(axis=1))
    first, end = _pages(own_pages, options, position, last, keys, least, most)
    listed = (number < ends[-1]) & (end > first)
    all_keys = jnp.minimum(batch.kv_lens, own_pages.most_keys)
    firsts = batch.kv_lens - batch.q_lens
    first_page, _ = _pages(own_pages, options, firsts, firsts, all_keys, None if spans is None else spans.least)
    sound = of(_sound(own_pages, operands.page_table, first_page, all_keys))
    words, count, place = compact(listed, WorkItem(seq, of(starts) + at, position, first, end, keys, sound))
    numbers = None
    if tree is not None or own is not None:
        numbers = numbers_of_items(options, tree, own, seq, at, begin, jnp.where(listed, place, np.int32(max_units)))

    pick = lambda x: x.at[token_seq].get(mode="promise_in_bounds")  # noqa: E731
    mine = pick(selected) & (token_row < pick(rows)) & (token_row >= 0)
    spot = jnp.where(mine, pick(starts) + token_row, np.int32(packed))
    tokens = jnp.arange(geometry.tokens, dtype=np.int32)
    source = jnp.zeros(packed, np.int32).at[spot].set(tokens, mode="drop")
    item = jnp.clip(pick(ends - blocks) + lax.div(token_row, block), 0, np.int32(max_units - 1))
    in_list = lambda x: x.at[item].get(mode="promise_in_bounds")  # noqa: E731
    return Chunks(
        words,
        count,
        source,
        jnp.where(mine, spot, 0),
        in_list(place),
        lax.rem(token_row, block),
        mine & in_list(listed),
        numbers,
    )


class OwnPages:
    """Which of a sequence's pages are in this device's table: all, or number p if p % stride is its place among the devices."""

    def __init__(self, geometry: Geometry, options: Options, shard: Any) -> None:
        self.geometry, self.stride, self.shard = geometry, options.stride, shard
        self.most_keys = np.int32(geometry.width * geometry.page * options.stride)

    def before(self, number: Any) -> Any:
        """How many of the first so many pages of a sequence are in the table."""
        if self.stride == 1:
            return number
        return lax.div(number + (np.int32(self.stride - 1) - self.shard), np.int32(self.stride))

    def begin(self, at: Any) -> Any:
        """The position of the first key in page `at` of the table."""
        number = at if self.stride == 1 else at * np.int32(self.stride) + self.shard
        return number * np.int32(self.geometry.page)

    def place(self, keys: Any) -> tuple[Any, Any]:
        """(the page in the table, below 0 if it isn't there, and how many keys in it) where a sequence of so many keys ends."""
        page = np.int32(self.geometry.page)
        number, tail = lax.div(keys, page), lax.rem(keys, page)
        if self.stride == 1:
            return number, tail
        number, shard = lax.div(number, np.int32(self.stride)), lax.rem(number, np.int32(self.stride))
        return jnp.where(shard == self.shard, number, -1), tail


def _pages(
    own: OwnPages,
    options: Options,
    first: jax.Array,
    last: jax.Array,
    keys: jax.Array,
    least: jax.Array | None = None,
    most: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(first page, one past the last) in the table that rows at the positions first to last see, besides keys from `least` to
    before `most`."""
    page = np.int32(own.geometry.page)
    begin = jnp.zeros_like(keys) if options.left is None else jnp.maximum(first - np.int32(options.left), 0)
    end = keys if options.reach is None else jnp.minimum(keys, last + np.int32(options.reach + 1))
    if options.chunk is not None:
        begin = jnp.maximum(begin, chunk_start(first, options.chunk))
        end = jnp.minimum(end, chunk_start(last, options.chunk) + np.int32(options.chunk))
    if least is not None:
        begin = jnp.minimum(begin, jnp.maximum(least, 0))
    if most is not None:
        end = jnp.maximum(end, jnp.minimum(most, keys))
    end = jnp.where(last >= 0, end, 0)  # a row before the first key sees nothing
    begin_page, end_page = lax.div(begin, page), lax.div(jnp.maximum(end, 0) + (page - 1), page)
    begin_page, end_page = own.before(begin_page), own.before(end_page)
    return begin_page, jnp.where(end > begin, end_page, begin_page)


def _sound(own: OwnPages, table: jax.Array, first: jax.Array, keys: jax.Array) -> jax.Array:
    """For each sequence: 1 if the ids of all pages with its keys, from the first visible one on, are in range, else 0."""
    geometry = own.geometry
    slot = jnp.arange(geometry.width, dtype=np.int32)[None]
    pages = own.before(lax.div(keys + np.int32(geometry.page - 1), np.int32(geometry.page)))
    beyond = (slot < first[:, None]) | (slot >= pages[:, None])
    return (beyond | ((table >= 0) & (table < geometry.pages))).all(axis=1).astype(np.int32)


def compact(listed: jax.Array, item: WorkItem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(words of the listed ones, packed; how many; the place of each among them)."""
    size = listed.shape[0]
    place = jnp.cumsum(listed, dtype=np.int32) - 1
    words = jnp.zeros((size, FIELDS), np.int32)
    words = words.at[jnp.where(listed, place, np.int32(size))].set(jnp.stack(item, axis=1), mode="drop")
    return words.reshape(-1), jnp.sum(listed, dtype=np.int32), jnp.maximum(place, 0)
