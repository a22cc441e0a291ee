"""Block bounds: what is known about whole blocks at run time, from the extents of rows, positions, keys and arrays.

live_blocks works on the host and is exact. Block bounds work with traced arrays and offsets, and report 'partial' in doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

__all__ = ["BlockBounds", "Blocks", "Extent", "between", "equal"]


class BlockBounds(NamedTuple):
    """For each block, bool, broadcastable to [batch, heads, q blocks, kv blocks]: whether any cell may be visible, and whether
    all cells certainly are."""

    some: Any
    every: Any

    def __and__(self, other: BlockBounds) -> BlockBounds:
        return BlockBounds(self.some & other.some, self.every & other.every)

    def __or__(self, other: BlockBounds) -> BlockBounds:
        return BlockBounds(self.some | other.some, self.every | other.every)

    def __invert__(self) -> BlockBounds:
        return BlockBounds(~self.every, ~self.some)


class Extent(NamedTuple):
    """The smallest and the largest value in a block, both inclusive; [1, 1, q, 1] for blocks of rows, [1, 1, 1, kv] of keys.

    Positions are [batch | 1, 1, q, 1]. All have rank 4, like the arrays of dynamic leaves, because ranks aren't promoted.
    """

    lo: Any
    hi: Any


@dataclass(frozen=True)
class Blocks:
    """Blocks of a mask: the extents of global rows, positions and keys. The last block of each may be shorter."""

    rows: Extent
    positions: Extent
    cols: Extent
    block_q: int
    block_kv: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.lo.shape[-2], self.cols.lo.shape[-1]

    def of_rows(self, array: Any) -> Extent:
        """The extents of an array [batch, q] in each block of rows."""
        return Extent(*(_reduced(array, 1, self.block_q, f)[:, None, :, None] for f in (jnp.min, jnp.max)))

    def of_keys(self, array: Any) -> Extent:
        """The extents of an array [batch, kv] in each block of keys."""
        return Extent(*(_reduced(array, 1, self.block_kv, f)[:, None, None, :] for f in (jnp.min, jnp.max)))

    def of_cells(self, array: Any) -> BlockBounds:
        """(any, all) for a bool array [batch, heads, q, kv] with size 1 where it broadcasts."""
        some = every = jnp.asarray(array)
        for axis, block in ((2, self.block_q), (3, self.block_kv)):
            some, every = _reduced(some, axis, block, jnp.any), _reduced(every, axis, block, jnp.all)
        return BlockBounds(some, every)


def equal(first: Extent, second: Extent) -> BlockBounds:
    """Block bounds of first == second."""
    single = (first.lo == first.hi) & (second.lo == second.hi)
    return BlockBounds((first.lo <= second.hi) & (second.lo <= first.hi), single & (first.lo == second.lo))


def between(lower: Extent | None, values: Extent, upper: Extent | None) -> BlockBounds:
    """Block bounds of lower <= values <= upper. None means no bound; at most one may be None."""
    above = None if lower is None else BlockBounds(values.hi >= lower.lo, values.lo >= lower.hi)
    below = None if upper is None else BlockBounds(values.lo <= upper.hi, values.hi <= upper.lo)
    both = [bound for bound in (above, below) if bound is not None]
    return both[0] & both[-1]


def _reduced(array: Any, axis: int, block: int, reduce: Any) -> Any:
    """Reduce each block of an axis; an axis of size 1 is kept."""
    array = jnp.asarray(array)
    size = array.shape[axis]
    if size == 1:
        return array
    count = -(-size // block)
    short = count * block - size
    if short:  # repeat the last value: it changes neither extent
        array = jnp.pad(array, [(0, short if i == axis else 0) for i in range(array.ndim)], mode="edge")
    shape = (*array.shape[:axis], count, block, *array.shape[axis + 1 :])
    return reduce(array.reshape(shape), axis=axis + 1)
