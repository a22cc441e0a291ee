"""Numbers of each query of a work item, as lanes of a row: its position, the drafts that it sees, the span that it is in."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..paged_mask import BITS, NO_KEY, DraftTree, Spans, tree_words
from .geometry import LANES, Geometry, Options

__all__ = ["MAX_DRAFTS", "Lanes", "Numbers", "numbers_of_items", "of_rows"]

MAX_DRAFTS = (LANES - 4) * BITS


class Lanes(NamedTuple):
    """Which lanes hold what. tree: the first of two, the row's position minus the item's and the slot from which on `words`
    decide; span: the first of two, the first key that the row sees besides and one past the last."""

    tree: int | None
    words: range
    span: int | None

    @classmethod
    def of(cls, options: Options) -> Lanes | None:
        """None if rows need no numbers."""
        words = tree_words(options.drafts)
        if not words and not options.spans:
            return None
        start = 2 if words else 0
        return cls(0 if words else None, range(start, start + words), start + words if options.spans else None)


def of_rows(spans: Spans, start: jax.Array, end: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """(begin, end) of the spans of each work item's rows, [work items, rows of a block]; start, end: its tokens."""
    token = start[:, None] + jnp.arange(options.queries_per_block, dtype=np.int32)[None]
    real = token < end[:, None]
    at = jnp.clip(token, 0, np.int32(len(spans.begin) - 1))
    begin, stop = (x.at[at].get(mode="promise_in_bounds") for x in (spans.begin, spans.end))
    return jnp.where(real, begin, NO_KEY), jnp.where(real, stop, 0)


def numbers_of_items(
    options: Options,
    tree: DraftTree | None,
    spans: tuple[jax.Array, jax.Array] | None,
    seq: jax.Array,
    at: jax.Array,
    first: jax.Array,
    places: jax.Array,
) -> jax.Array:
    """int32 [work items, rows of a block, 128]. spans: `of_rows`. Of each item: its sequence, its first row there, the position
    of that sequence's first row in this step, and its place in the list, beyond the end if it isn't listed."""
    columns: list[jax.Array] = []
    if tree is not None:
        columns += _of_tree(options, tree, seq, at, first)
    if spans is not None:
        columns += [x[..., None] for x in spans]
    wide = jnp.concatenate(columns, axis=2)
    wide = jnp.pad(wide, ((0, 0), (0, 0), (0, LANES - wide.shape[2])))
    return jnp.zeros_like(wide).at[places].set(wide, mode="drop")


def _of_tree(options: Options, tree: DraftTree, seq: jax.Array, at: jax.Array, first: jax.Array) -> list[jax.Array]:
    drafts = tree.depth.shape[1]
    number = jnp.arange(options.queries_per_block, dtype=np.int32)[None]
    row = at[:, None] + number
    used = tree.used.at[seq].get(mode="promise_in_bounds")[:, None]
    index = seq[:, None], jnp.minimum(row, np.int32(drafts - 1))
    depth, words = (x.at[index].get(mode="promise_in_bounds") for x in (tree.depth, tree.words))
    inside = used & (row < drafts)
    return [
        jnp.where(inside, depth, jnp.where(used, row, number))[..., None],
        jnp.broadcast_to(jnp.where(used, first[:, None], NO_KEY), row.shape)[..., None],
        jnp.where(inside[..., None], words, 0),
    ]


class Numbers:
    """What the rows of a work item see, by the numbers of a block of them."""

    def __init__(self, geometry: Geometry, options: Options, numbers: Any, keys: int) -> None:
        """numbers: a ref [rows of a block, 128]; keys: of a block of pages."""
        lanes = Lanes.of(options)
        assert lanes is not None
        self.lanes, self.geometry, self.numbers, self.keys = lanes, geometry, numbers, keys

    def _wide(self, lane: int) -> jax.Array:
        """A number of each row, over all of its heads and keys: [rows, keys]."""
        column = self.numbers[:, lane : lane + 1]
        block, group = column.shape[0], self.geometry.group
        wide = jnp.broadcast_to(column, (block, self.keys))
        if self.geometry.queries_first:
            return jnp.broadcast_to(wide[:, None], (block, group, self.keys)).reshape(block * group, self.keys)
        return jnp.broadcast_to(wide[None], (group, block, self.keys)).reshape(block * group, self.keys)

    def offset(self, row: jax.Array) -> jax.Array:
        """The rows' positions minus the item's; `row` without a tree."""
        return row if self.lanes.tree is None else self._wide(self.lanes.tree)

    def seen(self, seen: jax.Array, place: jax.Array) -> jax.Array:
        """`seen` by position, with what trees and spans say of the keys at `place`; [rows, keys] each."""
        if self.lanes.tree is not None:
            number = place - self._wide(self.lanes.tree + 1)
            bit = jnp.zeros(number.shape, jnp.int32)
            for n, lane in enumerate(self.lanes.words):
                at = number - np.int32(n * BITS)
                shifted = lax.shift_right_logical(self._wide(lane), jnp.clip(at, 0, BITS - 1)) & 1
                bit = bit | jnp.where((at >= 0) & (at < BITS), shifted, 0)
            seen = (seen & (number < 0)) | ((bit == 1) & (number >= 0))
        if self.lanes.span is not None:
            seen |= (place >= self._wide(self.lanes.span)) & (place < self._wide(self.lanes.span + 1))
        return seen
