"""recognise: find the mask of the algebra that equals a boolean array, and could be declared instead of it."""

from __future__ import annotations

import numpy as np

from .algebra import Full, Mask
from .static import Causal, Prefix, SlidingWindow

__all__ = ["recognise"]


def recognise(cells: np.ndarray, rows: np.ndarray, q_len: int, kv_len: int) -> Mask | None:
    """Full, Prefix, Causal or SlidingWindow if it has exactly these cells; else None.

    Shapes: cells bool [planes, len(rows), kv_len], where `rows` are query indices and a plane is a batch row or a head.
    The returned mask counts from the row's own index if q_len equals kv_len, else it has its own offset.
    """
    plane = cells[0]
    if not plane.any() or not (cells[1:] == plane).all():
        return None
    seen = np.flatnonzero(plane.any(axis=1))
    first = plane[seen].argmax(axis=1)
    last = kv_len - 1 - plane[seen][:, ::-1].argmax(axis=1)
    # A bound is visible in a row whose first key isn't 0, or whose last key isn't the last.
    left = next((int(rows[i] - lo) for i, lo in zip(seen, first, strict=True) if lo > 0), None)
    right = next((int(hi - rows[i]) for i, hi in zip(seen, last, strict=True) if hi < kv_len - 1), None)
    candidates: list[Mask] = [Full(), Prefix(int(last[0]) + 1)]
    if (left is None) != (right is None) or (left is not None and right is not None and left + right >= 0):
        candidates.append(_band(left, right, q_len == kv_len))
    row, column = rows[:, None], np.arange(kv_len)[None, :]
    return next((mask for mask in candidates if (mask.test(row, row, column) == plane).all()), None)


def _band(left: int | None, right: int | None, square: bool) -> Mask:
    """The simplest mask with the keys from i - left to i + right of row i."""
    if left is None:
        return Causal() if square and right == 0 else Causal(offset=right)
    if square and left >= 0 and (right is None or right >= 0):
        return SlidingWindow(left=left, right=right)
    # Distances can't be negative, so they are counted from the last visible key, or the first.
    offset = -left if right is None else right
    return SlidingWindow(left=left + offset, right=None if right is None else 0, offset=offset)
