"""What is known of whole blocks while a program runs: from the extents of rows, positions, keys, and traced arrays.

live_blocks answers on the host and exactly; this answers with traced arrays and offsets, and errs to 'partial'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

__all__ = ["Blocks", "Extent", "Reach", "between"]


class Reach(NamedTuple):
    """Of each block, bool, broadcastable to [batch, q blocks, kv blocks]: may something be seen, and is surely all seen."""

    some: Any
    every: Any


class Extent(NamedTuple):
    """The least and the largest value of a block, both inclusive; blocks of rows [..., q, 1], of keys [..., 1, kv]."""

    lo: Any
    hi: Any


@dataclass(frozen=True)
class Blocks:
    """Blocks of a mask: extents of global rows, of positions and of keys. The last block of each may be shorter."""

    rows: Extent
    positions: Extent
    cols: Extent
    block_q: int
    block_kv: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.lo.shape[-2], self.cols.lo.shape[-1]

    def of_rows(self, array: Any) -> Extent:
        """The extents of an array [batch, q]."""
        return Extent(*(x[..., None] for x in _extent(array, self.block_q)))

    def of_keys(self, array: Any) -> Extent:
        """The extents of an array [batch, kv]."""
        return Extent(*(x[..., None, :] for x in _extent(array, self.block_kv)))

    def of_cells(self, array: Any) -> Reach:
        """(any, all) of a bool array [batch, heads, q, kv] with sizes of 1 where it broadcasts; heads are joined."""
        some, every = array.any(axis=1), array.all(axis=1)
        for axis, block in ((1, self.block_q), (2, self.block_kv)):
            some, every = (_reduced(x, axis, block, f) for x, f in ((some, jnp.any), (every, jnp.all)))
        return Reach(some, every)


def between(first: Extent, second: Extent, left: int | None, right: int | None) -> Reach:
    """Of -left <= second - first <= right; None for no bound."""
    least, most = second.lo - first.hi, second.hi - first.lo
    some, every = most == most, least == least
    if left is not None:
        some, every = some & (most >= -left), every & (least >= -left)
    if right is not None:
        some, every = some & (least <= right), every & (most <= right)
    return Reach(some, every)


def _extent(array: Any, block: int) -> tuple[Any, Any]:
    array = jnp.asarray(array)
    return tuple(_reduced(array, array.ndim - 1, block, f) for f in (jnp.min, jnp.max))


def _reduced(array: Any, axis: int, block: int, reduce: Any) -> Any:
    """Reduce each block of an axis; an axis of size 1 stays."""
    size = array.shape[axis]
    if size == 1:
        return array
    short = -size % block
    if short:  # repeat the last value: it changes neither extent
        array = jnp.pad(array, [(0, short if i == axis else 0) for i in range(array.ndim)], mode="edge")
    shape = (*array.shape[:axis], (size + short) // block, block, *array.shape[axis + 1 :])
    return reduce(array.reshape(shape), axis=axis + 1)
