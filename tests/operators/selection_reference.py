"""Selected attention by its definitions, in float64 NumPy, one query at a time. Written from the papers, not from the code."""

from __future__ import annotations

from typing import Any

import numpy as np


def visible_keys(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    causal: bool = True,
    sliding_window: Any = None,
    query_offset: Any = 0,
    q_positions: Any = None,
    kv_lengths: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
) -> np.ndarray:
    """bool [batch, q_len, kv_len]."""
    seen = np.zeros((batch, q_len, kv_len), bool)
    left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window, sliding_window)
    for b in range(batch):
        for i in range(q_len):
            offset = query_offset if np.ndim(query_offset) == 0 else query_offset[b]
            at = i + int(offset) if q_positions is None else int(q_positions[b][i])
            for j in range(kv_len):
                ok = not causal or j <= at
                ok = ok and (left is None or j >= at - left) and (right is None or j <= at + right)
                ok = ok and (kv_lengths is None or j < kv_lengths[b])
                ok = ok and (q_segment_ids is None or q_segment_ids[b][i] == kv_segment_ids[b][j])
                seen[b, i, j] = ok
    return seen


def scores(query: Any, key: Any, weights: Any, scale: float, key_scale: Any = None) -> np.ndarray:
    """The indexer's score of each pair, [batch, q_len, kv_len]."""
    query, key, weights = (np.asarray(x, np.float64) for x in (query, key, weights))
    if key_scale is not None:
        key = key * np.asarray(key_scale, np.float64)[..., None]
    per_head = scale * np.einsum("bqhd,bkd->bqkh", query, key)
    return (weights[:, :, None, :] * np.where(per_head > 0, per_head, 0)).sum(-1)


def best(score: np.ndarray, seen: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions [batch, q_len, k], counts): by Python's sort of (a number at all, score, lower position first)."""
    batch, q_len, _ = score.shape
    positions, counts = np.full((batch, q_len, k), -1, np.int32), np.zeros((batch, q_len), np.int32)
    for b in range(batch):
        for i in range(q_len):
            keys = [int(j) for j in np.flatnonzero(seen[b, i])]
            row = score[b, i]
            keys.sort(key=lambda j: (np.isnan(row[j]), 0 if np.isnan(row[j]) else -row[j], j))
            chosen = sorted(keys[:k])
            positions[b, i, : len(chosen)], counts[b, i] = chosen, len(chosen)
    return positions, counts
