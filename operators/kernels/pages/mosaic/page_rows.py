"""Which keys the rows of a tile see: a run of keys for each, and bits where a tree of drafts decides.

A row sees itself by the mask and by its span, so both together are one run. Where devices have a sequence's pages in turn, a run
of its keys is one of those that a device has, counted over its own pages; so everything behind these numbers knows only the keys
of this device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..paged_mask import BITS, NO_KEY, DraftTree, PagedOptions, Spans, chunk_start, has_bit, packed_bits
from ..paged_step import Batch

__all__ = ["OwnKeys", "RowKeys", "RowTiles", "row_keys"]


class OwnKeys(NamedTuple):
    """Which of a sequence's keys a device has: those of page number p if p % stride is `shard`. width: pages of its table."""

    page: int
    width: int
    stride: int = 1
    shard: jax.Array | int = 0

    @property
    def most(self) -> int:
        """Keys of a sequence that tables of this width hold, on all devices."""
        return self.page * self.width * self.stride

    def before(self, keys: jax.Array) -> jax.Array:
        """How many of a sequence's first so many keys the device has."""
        if self.stride == 1:
            return keys
        number, rest = keys // np.int32(self.page), keys % np.int32(self.page)
        own = (number + np.int32(self.stride - 1) - self.shard) // np.int32(self.stride)
        return own * np.int32(self.page) + jnp.where(number % np.int32(self.stride) == self.shard, rest, 0)

    def place(self, own: jax.Array) -> jax.Array:
        """Where in its sequence a key is that is counted over the device's own."""
        if self.stride == 1:
            return own
        page = np.int32(self.page)
        return ((own // page) * np.int32(self.stride) + self.shard) * page + own % page


class RowTiles(NamedTuple):
    """Tiles of sequences' tokens, int32 [tiles] each: the sequence, the first token in it, and how many; 0 for a tile that isn't
    used."""

    sequence: jax.Array
    token: jax.Array
    tokens: jax.Array


class RowKeys(NamedTuple):
    """Keys that tokens of tiles see, counted over the device's own: low, high int32 [tiles, tokens], a run, nothing where
    high <= low; words int32 [tiles, tokens, n], bits of keys from first_draft [tiles] on, or None. Of each tile, int32 [tiles]:
    first, end, between which are all keys that any token sees; all_from, all_before, between which all tokens see all.
    positions int32 [tiles, tokens]: of the tokens, in a tree by their depth."""

    low: jax.Array
    high: jax.Array
    words: jax.Array | None
    first_draft: jax.Array
    first: jax.Array
    end: jax.Array
    all_from: jax.Array
    all_before: jax.Array
    positions: jax.Array


def row_keys(
    options: PagedOptions,
    batch: Batch,
    own: OwnKeys,
    tiles: RowTiles,
    tokens: int,
    tree: DraftTree | None = None,
    spans: Spans | None = None,
) -> RowKeys:
    """Of tiles of so many tokens."""
    of = lambda x: x.at[tiles.sequence].get(mode="promise_in_bounds")[:, None]  # noqa: E731
    row = tiles.token[:, None] + jnp.arange(tokens, dtype=np.int32)[None]
    used = row < (tiles.token + tiles.tokens)[:, None]
    begin, kv_len = of(batch.kv_lens - batch.q_lens), jnp.minimum(of(batch.kv_lens), np.int32(own.most))
    position, words = begin + row, None
    if tree is not None:
        drafts = tree.depth.shape[1]
        index = tiles.sequence[:, None], jnp.minimum(row, np.int32(drafts - 1))
        drafted = used & of(tree.used) & (row < drafts)
        position = jnp.where(drafted, begin + tree.depth.at[index].get(mode="promise_in_bounds"), position)
        words = _own_words(tree, own, batch).at[index].get(mode="promise_in_bounds")
        words = jnp.where(drafted[..., None], words, 0)
    low, high = _run(options, position, kv_len)
    if spans is not None:
        token = jnp.minimum(of(batch.starts) + row, np.int32(len(spans.begin) - 1))
        low = jnp.minimum(low, spans.begin.at[token].get(mode="promise_in_bounds"))
        high = jnp.maximum(high, jnp.minimum(spans.end.at[token].get(mode="promise_in_bounds"), kv_len))
    if tree is not None:
        high = jnp.where(of(tree.used), jnp.minimum(high, begin), high)
    low, high = (own.before(jnp.maximum(x, 0)) for x in (low, high))
    first_draft = own.before(jnp.maximum(begin, 0))
    some = used & (high > low)
    first, end = jnp.where(some, low, NO_KEY), jnp.where(some, high, 0)
    if tree is not None and words is not None:
        bits = (words != 0).any(axis=2)
        after = own.before(jnp.minimum(kv_len, begin + np.int32(tree.depth.shape[1])))
        first = jnp.where(bits, jnp.minimum(first, first_draft), first)
        end = jnp.where(bits, jnp.maximum(end, after), end)
    return RowKeys(
        jnp.where(used, low, 0),
        jnp.where(used, high, 0),
        words,
        first_draft[:, 0],
        first.min(axis=1),
        end.max(axis=1),
        jnp.where(used, low, 0).max(axis=1),
        jnp.where(used, high, NO_KEY).min(axis=1),
        position,
    )


def _run(options: PagedOptions, positions: jax.Array, kv_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(first, end) of the keys that queries at these positions see by the mask."""
    first, end = jnp.zeros_like(positions), jnp.broadcast_to(kv_len, positions.shape)
    if options.causal:
        end = jnp.minimum(end, positions + 1)
    if options.left is not None:
        first = jnp.maximum(first, positions - np.int32(options.left))
    if options.right is not None:
        end = jnp.minimum(end, positions + np.int32(options.right + 1))
    if options.chunk is not None:
        begin = chunk_start(positions, options.chunk)
        first, end = jnp.maximum(first, begin), jnp.minimum(end, begin + np.int32(options.chunk))
    return first, end


def _own_words(tree: DraftTree, own: OwnKeys, batch: Batch) -> jax.Array:
    """The tree's words, their bits those of the device's own keys from its first draft on; of keys that there are."""
    begin, kv_len = ((x[:, None]) for x in (batch.kv_lens - batch.q_lens, batch.kv_lens))
    count = jnp.arange(tree.words.shape[2] * BITS, dtype=np.int32)[None]
    place = own.place(own.before(jnp.maximum(begin, 0)) + count)
    bits = has_bit(tree.words, (place - begin)[:, None]) & (place < kv_len)[:, None]
    return packed_bits(bits)
