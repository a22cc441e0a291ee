"""Which keys some row of a mask sees, found without building the matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .algebra import Mask
from .grid import CELLS, Grid

__all__ = ["certainly_seen"]

_MAX_TESTS = 1 << 26  # of single cells: about a second
_SLAB = 1 << 14  # rows whose intervals are held at once


def certainly_seen(
    mask: Mask, q_len: int, kv_len: int, *, q_start: int = 0, query_offset: int = 0, k_start: int = 0
) -> NDArray[np.bool_] | None:
    """Whether some row of q_start..q_start+q_len sees each key of k_start..k_start+kv_len: bool [heads | 1, kv].

    With dynamic leaves: whether that is certain. None if it would take too many tests of single cells to find out.
    """
    return _seen(mask.bounds()[0], Grid(1, 1, q_len, kv_len, q_start, query_offset, k_start))


def _seen(mask: Mask, grid: Grid) -> NDArray[np.bool_] | None:
    heads = max(getattr(leaf, "heads", 1) for leaf in mask.leaves())
    keys = np.arange(grid.kv_len, dtype=np.int32) + np.int32(grid.k_start)
    seen = np.zeros((heads, grid.kv_len), bool)
    if not grid.q_len:
        return seen
    # A key is usually seen by the row at its own position, if by any.
    for offset in dict.fromkeys((grid.query_offset, 0)):
        rows = np.clip(keys - np.int32(offset), grid.q_start, grid.q_start + grid.q_len - 1).astype(np.int32)
        visible = np.asarray(mask.test(rows, rows + np.int32(grid.query_offset), keys))
        seen |= np.broadcast_to(visible.reshape(-1, visible.shape[-1]), seen.shape)
        if seen.all():
            return seen
    known = _covered(mask, grid)
    if known is not None:
        return known[None]
    missing = np.flatnonzero(~seen.all(axis=0))
    if len(missing) * grid.q_len > _MAX_TESTS:
        return None
    step = max(1, CELLS // (heads * grid.q_len))
    rows = np.arange(grid.q_len, dtype=np.int32)[:, None] + np.int32(grid.q_start)
    for first in range(0, len(missing), step):
        some = missing[first : first + step]
        visible = np.asarray(mask.test(rows, rows + np.int32(grid.query_offset), keys[some][None, :]))
        seen[:, some] = np.broadcast_to(visible, (heads, grid.q_len, len(some))).any(axis=1)
    return seen


def _covered(mask: Mask, grid: Grid) -> NDArray[np.bool_] | None:
    """Whether the rows' intervals, if the mask has them, cover each key: bool [kv]."""
    total = np.zeros(grid.kv_len + 1, np.int64)
    for first in range(0, grid.q_len, _SLAB):
        rows = np.arange(first, min(first + _SLAB, grid.q_len), dtype=np.int64) + grid.q_start
        known = mask.intervals(rows, rows + grid.query_offset, grid.k_start + grid.kv_len)
        if known is None:
            return None
        lo, hi = (np.maximum(edge - grid.k_start, 0).ravel() for edge in known)
        total += np.bincount(lo, minlength=len(total)) - np.bincount(hi, minlength=len(total))
    return np.cumsum(total)[:-1] > 0
