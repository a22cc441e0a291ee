"""How far a selection is from that of the float64 reference: by the scores of what was selected, not by positions.

Keys whose scores differ by a rounding error may change places, so a selection is judged by how far the greatest score that it
leaves out is above the least that it has, relative to the size of the row's terms. What no rounding explains is infinitely far: a
key that isn't visible, a position that comes twice or out of order, a number of keys other than it has to be.
"""

from __future__ import annotations

import numpy as np

from ..masks.causal_window import CausalWindow

__all__ = ["chosen_keys", "index_reference", "selection_error", "window_shows"]


_TINY = float(np.finfo(np.float32).tiny)


def window_shows(positions: np.ndarray, keys: np.ndarray, window: CausalWindow) -> np.ndarray:
    """Bool [rows, keys]: which keys queries at these positions see."""
    row, col = positions[:, None], keys[None, :]
    seen = np.ones((len(positions), len(keys)), bool)
    if window.causal:
        seen &= col <= row
    if window.left is not None:
        seen &= col >= row - window.left
    if window.right is not None:
        seen &= col <= row + window.right
    return seen


def chosen_keys(positions: np.ndarray, kv_len: int) -> np.ndarray:
    """Bool [batch, q, keys] of positions [batch, q, n]; a number that isn't a key's chooses nothing."""
    chosen = np.zeros((*positions.shape[:-1], kv_len + 1), bool)
    places = np.where((positions >= 0) & (positions < kv_len), positions, kv_len)
    np.put_along_axis(chosen, places.astype(np.int64), True, axis=-1)
    return chosen[..., :kv_len]


def index_reference(
    query: np.ndarray, key: np.ndarray, weights: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """(scores [rows, keys], sizes [rows]) in float64: query [rows, heads, dim], key [keys, dim], weights [rows, heads]. A size is
    what no score of the row exceeds: the sum of weight * scale * |query| * |key| over the heads."""
    query, key, weights = (np.asarray(x, np.float64) for x in (query, key, weights))
    scores, sizes = np.zeros((len(query), len(key))), np.zeros((len(query), len(key)))
    norms = np.linalg.norm(key, axis=-1)
    for head in range(query.shape[1]):
        products = np.sign(scale) * (query[:, head] @ key.T)
        scores += weights[:, head, None] * np.maximum(products, 0)
        most = abs(scale) * np.linalg.norm(query[:, head], axis=-1)[:, None] * norms
        sizes += np.abs(weights[:, head, None]) * most
    return abs(scale) * scores, sizes.max(-1, initial=0.0)  # scaled at the end: equal sums of whole numbers stay equal


def selection_error(
    positions: np.ndarray, counts: np.ndarray, scores: np.ndarray, sizes: np.ndarray, seen: np.ndarray
) -> tuple[float, float]:
    """(the largest such difference of a row, the same relative to its size).

    positions [rows, k] ascending and then -1, counts [rows], bool [rows, keys] which keys are visible.
    """
    worst, relative = 0.0, 0.0
    for chosen, count, score, size, visible in zip(positions, counts, scores, sizes, seen, strict=True):
        used = chosen[: int(count)]
        wanted = min(len(chosen), int(visible.sum()))
        ascending = (np.diff(used) > 0).all() and (chosen[int(count) :] == -1).all()
        within = ((used >= 0) & (used < len(score))).all()
        if int(count) != wanted or not ascending or not within or not visible[used].all():
            return np.inf, np.inf
        if not wanted:
            continue
        left_out = visible.copy()
        left_out[used] = False
        short = max(0.0, float(score[left_out].max(initial=-np.inf) - score[used].min()))
        worst, relative = max(worst, short), max(relative, short / max(float(size), _TINY))
    return worst, relative
