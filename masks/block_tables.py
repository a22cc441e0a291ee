"""Block tables: convert a layout with one block size to another block size, by counting."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .bounds import BlockBounds, Blocks
from .int_arrays import same_rank
from .intervals import Intervals

__all__ = ["counted", "counted_bounds", "runs"]


def counted(table: NDArray[np.bool_], rows: Sequence[NDArray[Any]], cols: Sequence[NDArray[Any]]) -> NDArray[np.int8]:
    """0 none, 1 some, 2 all, int8 [..., q, kv], for rectangles of a bool table [..., q, kv] bounded by rows and cols.

    rows, cols: the first and the last of each rectangle, inclusive.
    """
    some, every = _rectangles(table, rows, cols, np)
    block_mask: NDArray[np.int8] = some.astype(np.int8) + every
    return block_mask


def counted_bounds(leaf: Any, blocks: Blocks) -> BlockBounds:
    """Block bounds of a leaf with a `table`; exact for this leaf."""
    rows = [edge.reshape(-1) // leaf.block_q for edge in blocks.rows]
    cols = [edge.reshape(-1) // leaf.block_kv for edge in blocks.cols]
    host = isinstance(cols[0], np.ndarray)
    width = cols[0].size
    # If the position of the first key is traced, its block may be cut anywhere.
    count = int(cols[1][-1]) + 1 - int(cols[0][0]) if host else -(-width * blocks.block_kv // leaf.block_kv) + 1
    first = int(cols[0][0]) if host else cols[0][0]
    table = leaf.table(first, count)
    last_row = table.shape[2] - 1
    rows = [edge.clip(0, last_row) for edge in rows]
    xp: Any = np if all(isinstance(x, np.ndarray) for x in (table, *rows, *cols)) else jnp
    return BlockBounds(*_rectangles(table, rows, [(edge - first).clip(0, count - 1) for edge in cols], xp))


def _rectangles(table: Any, rows: Sequence[Any], cols: Sequence[Any], xp: Any) -> tuple[Any, Any]:
    """(any, all) for each rectangle."""
    (top, bottom), (left, right) = rows, cols
    if (
        all(isinstance(x, np.ndarray) for x in (top, bottom, left, right))
        and _single(top, bottom)
        and _single(left, right)
    ):
        corners = xp.take(xp.take(table, top, axis=-2), left, axis=-1)
        return corners, corners
    counts = _along(table, top, bottom, -2, xp)
    counts = _along(counts, left, right, -1, xp)
    area = (bottom - top + 1)[:, None] * (right - left + 1)[None, :]
    return counts > 0, operator.eq(*same_rank(counts, area))


def _single(first: NDArray[Any], last: NDArray[Any]) -> bool:
    return bool((first == last).all())


def _along(table: Any, first: Any, last: Any, axis: int, xp: Any) -> Any:
    """Sums of table[first : last + 1] along an axis."""
    if xp is np and (first[1:] == last[:-1] + 1).all() and (last >= first).all():  # adjacent, the usual case
        inside = (
            np.take(table, np.arange(first[0], last[-1] + 1), axis=axis) if last[-1] + 1 < table.shape[axis] else table
        )
        return _sums(inside, first - (first[0] if inside is not table else 0), axis)
    sums = xp.cumsum(table, axis=axis, dtype=np.int32)
    nothing = xp.zeros_like(xp.take(sums, np.zeros(1, int), axis=axis))
    sums = xp.concatenate([nothing, sums], axis=axis)
    return xp.take(sums, last + 1, axis=axis) - xp.take(sums, first, axis=axis)


def _sums(table: NDArray[Any], first: NDArray[Any], axis: int) -> NDArray[np.int32]:
    """Sums from each start to the next. For equal widths, add one slice per cell of a width."""
    widths = np.diff(first)
    width = int(widths[0]) if len(widths) else 0
    if not width or width > 16 or (widths != width).any() or first[0] or len(first) * width != table.shape[axis]:
        return np.add.reduceat(table, first, axis=axis, dtype=np.int32)
    cells = [slice(start, None, width) for start in range(width)]
    parts = (table[..., cell, :] if axis == -2 else table[..., cell] for cell in cells)
    small = np.int32 if table.dtype != np.bool_ else np.int8
    total: NDArray[Any] = np.zeros_like(table[..., cells[0], :] if axis == -2 else table[..., cells[0]], dtype=small)
    for part in parts:
        total += part
    return total.astype(np.int32)


def runs(layout: NDArray[np.bool_], block_kv: int, q_blocks: NDArray[Any], end: int) -> Intervals:
    """The visible keys of each row as intervals, from a layout [q blocks, kv blocks] and the query block of each row."""
    used_blocks, row = np.unique(q_blocks, return_inverse=True)
    steps = np.diff(np.pad(layout[used_blocks], ((0, 0), (1, 1))).astype(np.int8), axis=1)
    count = (steps == 1).sum(axis=1)
    max_runs = max(1, int(count.max(initial=0)))
    ends = np.full((2, max_runs, len(used_blocks)), end, np.int64)
    for edge, kind in enumerate((1, -1)):
        at, block = np.nonzero(steps == kind)
        place = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
        ends[edge, place, at] = np.minimum(block * block_kv, end)
    lo, hi = ends[:, :, row]
    return np.where(lo < hi, lo, end), np.where(lo < hi, hi, end)
