"""Which blocks of the attention matrix are dead, partial or full, found without building the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block_tree import has_blocks, joined_heads, tree_blocks
from .grid import CELLS, Grid
from .intervals import Intervals, intersect, single
from .node import Node

__all__ = ["Grid", "has_dead_rows", "live_blocks", "live_blocks_by_head"]


def live_blocks(lower: Node[Any], upper: Node[Any], grid: Grid) -> NDArray[np.int8]:
    """See Mask.live_blocks. lower, upper: the static bounds of the mask; the same object for a static mask."""
    return joined_heads(live_blocks_by_head(lower, upper, grid))


def live_blocks_by_head(lower: Node[Any], upper: Node[Any], grid: Grid) -> NDArray[np.int8]:
    """The same for each head, int8 [heads | 1, q blocks, kv blocks]."""
    block_mask = _of_heads(upper, grid)
    if lower is not upper:
        block_mask = np.where(_of_heads(lower, grid) == 2, np.int8(2), np.minimum(block_mask, np.int8(1)))
    return block_mask


def _of_heads(mask: Node[Any], grid: Grid) -> NDArray[np.int8]:
    return tree_blocks(mask, grid, _static_blocks) if has_blocks(mask) else _static_blocks(mask, grid)[None]


def has_dead_rows(mask: Node[Any], grid: Grid) -> bool:
    """Whether some row of a static mask sees no key. The grid's keys start at key 0."""
    heads = max(getattr(leaf, "heads", 1) for leaf in mask.leaves())
    if heads > 1:
        return any(has_dead_rows(_of_head(mask, head), grid) for head in range(heads))
    for _, rows in grid.slabs():
        known = _intervals(mask, grid, rows)
        if known is not None:
            if (known[0][0] >= known[1][0]).any():
                return True
            continue
        step = max(1, CELLS // max(grid.kv_len, 1))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            seen = np.zeros(len(some), bool)
            for keys in _pieces(0, grid.kv_len, max(1, CELLS // len(some))):
                seen |= _visible(mask, grid, some, keys).any(axis=1)
            if not seen.all():
                return True
    return False


def _of_head(mask: Node[Any], head: int) -> Node[Any]:
    """The mask of one head: each Blocks leaf is replaced by that head's layout."""
    return mask.map_leaves(lambda leaf: leaf.of_heads([head]) if leaf.kind == "blocks" else leaf)


def _static_blocks(mask: Node[Any], grid: Grid) -> NDArray[np.int8]:
    block_mask = np.zeros(grid.shape, np.int8)
    for where, rows in grid.slabs():
        known = _intervals(mask, grid, rows)
        block_mask[where] = _evaluated(mask, grid, rows) if known is None else _counted(known, grid)
    return block_mask


def _intervals(mask: Node[Any], grid: Grid, rows: NDArray[np.int64]) -> Intervals | None:
    """The visible keys of each row, counted from key 0."""
    return mask.intervals(rows, rows + grid.query_offset, grid.k_start + grid.kv_len)


def _counted(known: Intervals, grid: Grid) -> NDArray[np.int8]:
    """Blocks from intervals: each row adds 1 where a run of touched (covered) blocks begins, and -1 after its end."""
    lo, hi = known
    if grid.k_start:  # an interval that ends before the grid's first key becomes empty
        lo, hi = np.maximum(lo - grid.k_start, 0), np.maximum(hi - grid.k_start, 0)
    block, width = grid.block_kv, grid.shape[1] + 1
    rows = lo.shape[1]
    count = -(-rows // grid.block_q)
    base = np.arange(rows, dtype=np.int64) // grid.block_q * width
    touched = np.zeros(count * width, np.int64)
    covered = np.zeros(count * width, np.int64)
    for k in range(lo.shape[0]):
        for total, (first, last) in (
            (touched, (lo[k] // block, -(-hi[k] // block))),
            (covered, (-(-lo[k] // block), np.where(hi[k] == grid.kv_len, width - 1, hi[k] // block))),
        ):
            # An empty interval touches no block and a short one covers none: in both cases the run is empty.
            last = np.where(lo[k] < hi[k], np.maximum(first, last), first)
            total += np.bincount(base + first, minlength=len(total))
            total -= np.bincount(base + last, minlength=len(total))
    any_row = np.cumsum(touched.reshape(count, width), axis=1)[:, :-1] > 0
    height = np.minimum(grid.block_q, rows - np.arange(count) * grid.block_q)
    all_rows = np.cumsum(covered.reshape(count, width), axis=1)[:, :-1] == height[:, None]
    return any_row.astype(np.int8) + all_rows


def _evaluated(mask: Node[Any], grid: Grid, rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """Blocks from the test, one block row at a time, only where the conjuncts with intervals leave some."""
    end = grid.k_start + grid.kv_len
    known = [_intervals(part, grid, rows) for part in mask.conjuncts()]
    outer = intersect([single(0, end, len(rows), end), *(x for x in known if x is not None)], end)
    block_mask = _counted(outer, grid)
    for i, blocks in enumerate(block_mask):
        some = rows[i * grid.block_q : (i + 1) * grid.block_q]
        candidates = np.flatnonzero(blocks)
        if not len(candidates):
            continue
        stop = min((int(candidates[-1]) + 1) * grid.block_kv, grid.kv_len)
        step = max(1, CELLS // (len(some) * grid.block_kv)) * grid.block_kv
        for keys in _pieces(int(candidates[0]) * grid.block_kv, stop, step):
            seen = _visible(mask, grid, some, keys)
            edges = np.arange(0, len(keys), grid.block_kv)
            any_key = np.logical_or.reduceat(seen.any(axis=0), edges)
            all_keys = np.logical_and.reduceat(seen.all(axis=0), edges)
            first = int(keys[0]) // grid.block_kv
            blocks[first : first + len(edges)] = any_key.astype(np.int8) + all_keys
    return block_mask


def _pieces(start: int, stop: int, step: int) -> Iterator[NDArray[np.int32]]:
    for first in range(start, stop, step):
        yield np.arange(first, min(first + step, stop), dtype=np.int32)


def _visible(mask: Node[Any], grid: Grid, rows: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.bool_]:
    column, row = rows.astype(np.int32)[:, None], keys[None, :] + np.int32(grid.k_start)
    seen = mask.test(column, column + np.int32(grid.query_offset), row)
    return np.broadcast_to(seen, (len(rows), len(keys)))
