"""Numbers of each query of a work item, as lanes of a row: its position, and what it sees of its step's own tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..paged_mask import BITS, DraftTree, tree_words
from .geometry import LANES, Geometry, Options

__all__ = ["MAX_DRAFTS", "Lanes", "SeenDrafts", "numbers_of_items"]

_NO_SLOT = np.iinfo(np.int32).max


class Lanes(NamedTuple):
    """Which lane holds what. offset: the row's position minus the item's; first: the slot from which on `words` decide."""

    offset: int
    first: int
    words: range

    @classmethod
    def of(cls, options: Options) -> Lanes | None:
        """None if rows need no numbers."""
        return cls(0, 1, range(2, 2 + tree_words(options.drafts))) if options.drafts else None


MAX_DRAFTS = (LANES - 2) * BITS


def numbers_of_items(
    options: Options, tree: DraftTree, seq: jax.Array, at: jax.Array, first: jax.Array, places: jax.Array
) -> jax.Array:
    """int32 [work items, rows of a block, 128]. Of each item: its sequence, its first row there, the position of that sequence's
    first row in this step, and its place in the list, beyond the end if it isn't listed."""
    drafts = tree.depth.shape[1]
    number = jnp.arange(options.queries_per_block, dtype=np.int32)[None]
    row = at[:, None] + number
    used = tree.used.at[seq].get(mode="promise_in_bounds")[:, None]
    index = seq[:, None], jnp.minimum(row, np.int32(drafts - 1))
    depth, words = (x.at[index].get(mode="promise_in_bounds") for x in (tree.depth, tree.words))
    inside = used & (row < drafts)
    columns = [
        jnp.where(inside, depth, jnp.where(used, row, number))[..., None],
        jnp.broadcast_to(jnp.where(used, first[:, None], np.int32(_NO_SLOT)), row.shape)[..., None],
        jnp.where(inside[..., None], words, 0),
    ]
    wide = jnp.concatenate(columns, axis=2)
    wide = jnp.pad(wide, ((0, 0), (0, 0), (0, LANES - wide.shape[2])))
    return jnp.zeros_like(wide).at[places].set(wide, mode="drop")


class SeenDrafts:
    """What the rows of a work item see, by the numbers in a block of them."""

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

    def offset(self) -> jax.Array:
        """The rows' positions minus the item's."""
        return self._wide(self.lanes.offset)

    def among(self, seen: jax.Array, place: jax.Array) -> jax.Array:
        """`seen` by position, with what words say of the drafts among the keys at `place`, [rows, keys] each."""
        number = place - self._wide(self.lanes.first)
        bit = jnp.zeros(number.shape, jnp.int32)
        for n, lane in enumerate(self.lanes.words):
            at = number - np.int32(n * BITS)
            shifted = lax.shift_right_logical(self._wide(lane), jnp.clip(at, 0, BITS - 1)) & 1
            bit = bit | jnp.where((at >= 0) & (at < BITS), shifted, 0)
        return (seen & (number < 0)) | ((bit == 1) & (number >= 0))
