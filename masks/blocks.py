"""Which blocks of the attention matrix are dead, partial or full, without ever building the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import whole
from .intervals import Intervals, intersect, single
from .node import Node

__all__ = ["Grid", "has_dead_rows", "live_blocks"]

# Rows and cells looked at together. They bound the memory, not the answer; 2**14 rows of int64 stay in the
# cache, which took causal 128k x 128k in 512 blocks from 9 to 3 ms.
_ROWS = 1 << 14
_CELLS = 1 << 22


@dataclass(frozen=True)
class Grid:
    """Blocks over rows q_start..q_start+q_len and keys k_start..k_start+kv_len."""

    block_q: int
    block_kv: int
    q_len: int
    kv_len: int
    q_start: int
    query_offset: int
    k_start: int = 0

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "q_len", "kv_len", "q_start", "k_start"):
            minimum = 1 if name.startswith("block") else 0
            object.__setattr__(self, name, whole(getattr(self, name), name, minimum=minimum))
        object.__setattr__(self, "query_offset", whole(self.query_offset, "query_offset"))

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.q_len // self.block_q), -(-self.kv_len // self.block_kv)

    def slabs(self) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """(block rows, their rows) in pieces of bounded size."""
        count, width = self.shape
        step = max(1, min(_ROWS // self.block_q, _CELLS // (width + 1)))
        for first in range(0, count, step):
            last = min(first + step, count)
            rows = np.arange(first * self.block_q, min(last * self.block_q, self.q_len), dtype=np.int64)
            yield slice(first, last), rows + self.q_start


def live_blocks(lower: Node[Any], upper: Node[Any], grid: Grid) -> NDArray[np.int8]:
    """See Mask.live_blocks; of a mask between two static ones, or of the static one that both are."""
    found = _static_blocks(upper, grid)
    if lower is not upper:
        found = np.minimum(found, 1)
        found[_static_blocks(lower, grid) == 2] = 2
    return found


def has_dead_rows(mask: Node[Any], grid: Grid) -> bool:
    """Whether some row sees no key by a static mask. The grid's keys are counted from the first."""
    for _, rows in grid.slabs():
        known = _intervals(mask, grid, rows)
        if known is not None:
            if (known[0][0] >= known[1][0]).any():
                return True
            continue
        step = max(1, _CELLS // max(grid.kv_len, 1))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            seen = np.zeros(len(some), bool)
            for keys in _pieces(0, grid.kv_len, max(1, _CELLS // len(some))):
                seen |= _visible(mask, grid, some, keys).any(axis=1)
            if not seen.all():
                return True
    return False


def _static_blocks(mask: Node[Any], grid: Grid) -> NDArray[np.int8]:
    found = np.zeros(grid.shape, np.int8)
    for where, rows in grid.slabs():
        known = _intervals(mask, grid, rows)
        found[where] = _evaluated(mask, grid, rows) if known is None else _counted(known, grid)
    return found


def _intervals(mask: Node[Any], grid: Grid, rows: NDArray[np.int64]) -> Intervals | None:
    """The visible keys of each row, counted from key 0."""
    return mask.intervals(rows, rows + grid.query_offset, grid.k_start + grid.kv_len)


def _counted(known: Intervals, grid: Grid) -> NDArray[np.int8]:
    """Blocks from intervals: each row adds 1 where a run of touched (covered) blocks begins, -1 after it."""
    lo, hi = known
    if grid.k_start:  # what ends before the grid's first key becomes empty
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
            # An empty interval touches nothing, a short one covers nothing: both make the run empty.
            last = np.where(lo[k] < hi[k], np.maximum(first, last), first)
            total += np.bincount(base + first, minlength=len(total))
            total -= np.bincount(base + last, minlength=len(total))
    any_row = np.cumsum(touched.reshape(count, width), axis=1)[:, :-1] > 0
    height = np.minimum(grid.block_q, rows - np.arange(count) * grid.block_q)
    all_rows = np.cumsum(covered.reshape(count, width), axis=1)[:, :-1] == height[:, None]
    return any_row.astype(np.int8) + all_rows


def _evaluated(mask: Node[Any], grid: Grid, rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """Blocks from the test, one block row at a time, only where the conjuncts with intervals leave any."""
    end = grid.k_start + grid.kv_len
    known = [_intervals(part, grid, rows) for part in mask.conjuncts()]
    outer = intersect([single(0, end, len(rows), end), *(x for x in known if x is not None)], end)
    found = _counted(outer, grid)
    for i, blocks in enumerate(found):
        some = rows[i * grid.block_q : (i + 1) * grid.block_q]
        wanted = np.flatnonzero(blocks)
        if not len(wanted):
            continue
        stop = min((int(wanted[-1]) + 1) * grid.block_kv, grid.kv_len)
        step = max(1, _CELLS // (len(some) * grid.block_kv)) * grid.block_kv
        for keys in _pieces(int(wanted[0]) * grid.block_kv, stop, step):
            seen = _visible(mask, grid, some, keys)
            edges = np.arange(0, len(keys), grid.block_kv)
            any_key = np.logical_or.reduceat(seen.any(axis=0), edges)
            all_keys = np.logical_and.reduceat(seen.all(axis=0), edges)
            first = int(keys[0]) // grid.block_kv
            blocks[first : first + len(edges)] = any_key.astype(np.int8) + all_keys
    return found


def _pieces(start: int, stop: int, step: int) -> Iterator[NDArray[np.int32]]:
    for first in range(start, stop, step):
        yield np.arange(first, min(first + step, stop), dtype=np.int32)


def _visible(mask: Node[Any], grid: Grid, rows: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.bool_]:
    column, row = rows.astype(np.int32)[:, None], keys[None, :] + np.int32(grid.k_start)
    seen = mask.test(column, column + np.int32(grid.query_offset), row)
    return np.broadcast_to(seen, (len(rows), len(keys)))
