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


def chosen_keys(positions: Any, kv_len: int) -> np.ndarray:
    """bool [batch, q_len, kv_len] of positions; a number that isn't a key's chooses nothing."""
    return (np.asarray(positions)[..., None] == np.arange(kv_len)).any(2)


def attention(
    query: Any,
    key: Any,
    value: Any,
    seen: np.ndarray,
    scale: float,
    soft_cap: float | None = None,
    sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(output [batch, q_len, heads, value_dim], lse [batch, heads, q_len]); arrays may be complex, for `gradients`."""
    group = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, group, 2), np.repeat(value, group, 2)
    logits = scale * np.einsum("bqhd,bkhd->bhqk", query, key)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    weights = np.where(seen[:, None], np.exp(logits), 0)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + np.exp(sinks)[None, :, None]
    some = total != 0
    output = np.einsum("bhqk,bkhv->bqhv", weights / np.where(some, total, 1)[..., None], value)
    return output, np.where(some, np.log(np.where(some, total, 1)), -np.inf)


def gradients(function: Any, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """The derivative of a real function of arrays by each element, from a step along the imaginary axis: exact to rounding."""
    arrays = {name: np.asarray(x, np.complex128) for name, x in arrays.items()}
    found = {}
    for name, x in arrays.items():
        found[name] = np.zeros(x.shape)
        for place in np.ndindex(x.shape):
            moved = x.copy()
            moved[place] += 1e-30j
            found[name][place] = function(**(arrays | {name: moved})).imag / 1e-30
    return found


def indexer_loss(
    index_query: Any,
    index_key: Any,
    weights: Any,
    query: Any,
    key: Any,
    seen: np.ndarray,
    scale: float,
    index_scale: float,
    soft_cap: float | None = None,
    lse: Any = None,
) -> Any:
    """The mean over queries with keys of sum p (log p - log q); the indexer's arrays may be complex."""
    total, count = 0.0, 0
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    group = query.shape[2] // key.shape[2]
    for b, i in np.ndindex(query.shape[:2]):
        keys = np.flatnonzero(seen[b, i])
        if not len(keys):
            continue
        p = np.zeros(len(keys))
        for h in range(query.shape[2]):
            logits = scale * key[b, keys, h // group] @ query[b, i, h]
            logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
            p += np.exp(logits - (np.log(np.exp(logits).sum()) if lse is None else lse[b, h, i]))
        p /= p.sum()
        per_head = index_scale * (index_key[b, keys] @ index_query[b, i].T)
        score = np.where(per_head.real > 0, per_head, 0) @ weights[b, i]
        total = total + (p * (np.log(p) - score + np.log(np.exp(score).sum()))).sum()
        count += 1
    return total / max(count, 1)


def best_blocks(score: Any, allowed: Any, always: Any, k: int) -> np.ndarray:
    """bool [blocks]: those that are always chosen, then the best, at equal scores the lower ones, k together."""
    order = sorted(
        np.flatnonzero(allowed), key=lambda j: (not always[j], np.isnan(score[j]), -np.nan_to_num(score[j]), j)
    )
    return np.isin(np.arange(len(score)), order[:k])
