"""Sets of keys as intervals: one small set per row, for all rows at once.

A set is (lo, hi), int64 [K, rows]: half-open, sorted along K, disjoint, not adjacent, within [0, end). Unused
intervals come last and are lo == hi == end: so lo and hi are sorted, and the complement is a shift by one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Intervals", "complement", "intersect", "single", "unite"]

Intervals = tuple[NDArray[np.int64], NDArray[np.int64]]


def single(lo: NDArray[Any] | int, hi: NDArray[Any] | int, rows: int, end: int) -> Intervals:
    """One interval per row, clipped to [0, end)."""
    lo = np.broadcast_to(np.clip(np.asarray(lo, np.int64), 0, end), (1, rows))
    hi = np.broadcast_to(np.clip(np.asarray(hi, np.int64), 0, end), (1, rows))
    return _park(lo, hi, end)


def intersect(sets: Sequence[Intervals], end: int) -> Intervals:
    """The keys that are in all sets."""
    return functools.reduce(lambda first, second: _both(first, second, end), sets)


def _both(first: Intervals, second: Intervals, end: int) -> Intervals:
    lo = np.maximum(first[0][:, None], second[0][None])
    hi = np.minimum(first[1][:, None], second[1][None])
    rows = lo.shape[-1]
    return _normalise(lo.reshape(-1, rows), hi.reshape(-1, rows), end)


def unite(sets: Sequence[Intervals], end: int) -> Intervals:
    """The keys that are in any set."""
    return _normalise(np.concatenate([s[0] for s in sets]), np.concatenate([s[1] for s in sets]), end)


def complement(set_: Intervals, end: int) -> Intervals:
    """The keys in [0, end) that are not in the set."""
    lo, hi = set_
    first = np.zeros((1, lo.shape[1]), np.int64)
    last = np.full((1, lo.shape[1]), end, np.int64)
    before, after = np.concatenate([first, hi, last]), np.concatenate([lo, last, last])
    # The gaps are already in normal form, but if the set begins at 0 the first gap is empty and is dropped.
    from_zero = lo[0] == 0
    lo, hi = np.where(from_zero, before[1:], before[:-1]), np.where(from_zero, after[1:], after[:-1])
    used = max(1, int((lo < hi).any(axis=1).sum()))
    return lo[:used], hi[:used]


def _park(lo: NDArray[np.int64], hi: NDArray[np.int64], end: int) -> Intervals:
    """Move empty intervals to the end of the keys."""
    empty = lo >= hi
    return (np.where(empty, end, lo), np.where(empty, end, hi)) if empty.any() else (lo, hi)


def _normalise(lo: NDArray[np.int64], hi: NDArray[np.int64], end: int) -> Intervals:
    """Sort, merge intervals that overlap or touch, and drop each K that no row uses."""
    lo, hi = _park(lo, hi, end)
    count, rows = lo.shape
    if count == 1 or rows == 0:
        return lo[:1], hi[:1]
    if (lo[1:] < lo[:-1]).any():
        order = np.argsort(lo, axis=0, kind="stable")
        lo, hi = np.take_along_axis(lo, order, 0), np.take_along_axis(hi, order, 0)
    furthest = np.maximum.accumulate(hi, axis=0)
    filled = lo < hi
    starts = filled.copy()
    starts[1:] &= lo[1:] > furthest[:-1]
    index = np.cumsum(starts, axis=0) - 1
    used = max(1, int(index[-1].max()) + 1)
    if (starts == filled).all():
        return lo[:used], hi[:used]
    out_lo = np.full((used + 1, rows), end, np.int64)
    out_hi = np.full((used + 1, rows), end, np.int64)
    column = np.arange(rows)
    for k in range(count):  # the extra last row receives what index -1 (no interval yet) would write
        out_lo[np.where(starts[k], index[k], used), column] = lo[k]
        out_hi[np.where(filled[k], index[k], used), column] = furthest[k]
    return out_lo[:used], out_hi[:used]
