"""recognise: which mask of the algebra a boolean array is, if it is one: what could have been declared in its place."""

from __future__ import annotations

import numpy as np

from .algebra import Full, Mask
from .static import Causal, Prefix, SlidingWindow

__all__ = ["recognise"]


def recognise(cells: np.ndarray, rows: np.ndarray, q_len: int, kv_len: int) -> Mask | None:
    """Full, Prefix, Causal or SlidingWindow, if it says exactly these cells; else None.

    Shapes: cells bool [planes, len(rows), kv_len], where `rows` are indices of queries and a plane is a batch row or head.
    A mask that is returned counts from the row's own index where q_len is kv_len, else by its own offset.
    """
    plane = cells[0]
    if not plane.any() or not (cells[1:] == plane).all():
        return None
    seen = np.flatnonzero(plane.any(axis=1))
    first = plane[seen].argmax(axis=1)
    last = kv_len - 1 - plane[seen][:, ::-1].argmax(axis=1)
    # Where a bound shows: a row whose first key isn't 0, one whose last key isn't the last.
    left = next((int(rows[i] - lo) for i, lo in zip(seen, first, strict=True) if lo > 0), None)
    right = next((int(hi - rows[i]) for i, hi in zip(seen, last, strict=True) if hi < kv_len - 1), None)
    candidates: list[Mask] = [Full(), Prefix(int(last[0]) + 1)]
    if (left is None) != (right is None) or (left is not None and right is not None and left + right >= 0):
        candidates.append(_band(left, right, q_len == kv_len))
    row, column = rows[:, None], np.arange(kv_len)[None, :]
    return next((mask for mask in candidates if (mask.test(row, row, column) == plane).all()), None)


def _band(left: int | None, right: int | None, square: bool) -> Mask:
    """The keys from i - left to i + right of row i, in the plainest words."""
    if left is None:
        return Causal() if square and right == 0 else Causal(offset=right)
    if square and left >= 0 and (right is None or right >= 0):
        return SlidingWindow(left=left, right=right)
    # Distances aren't below 0, so they are counted from where the last visible key stands, or the first.
    offset = -left if right is None else right
    return SlidingWindow(left=left + offset, right=None if right is None else 0, offset=offset)
