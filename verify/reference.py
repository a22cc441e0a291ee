"""The definition of attention in attnops, in float64 NumPy. Everything else is tested against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..scores import Score
from .score_reference import PlacedScore, placed_score

__all__ = ["ReferenceOutput", "reference_attention", "reference_gradients"]


class ReferenceOutput(NamedTuple):
    """output [batch, q, heads, value_dim], weights [batch, heads, q, kv] before dropout, lse [batch, heads, q]."""

    output: np.ndarray
    weights: np.ndarray
    lse: np.ndarray


class Forward(NamedTuple):
    """What both passes share; a kv head's tensors are repeated for each of its query heads; `capped` are logits after the
    cap, `sunk` the sinks' weights."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    raw: np.ndarray
    capped: np.ndarray
    weights: np.ndarray
    sunk: np.ndarray
    dropped: np.ndarray
    lse: np.ndarray
    visible: np.ndarray


def _sums(weights: np.ndarray, visible: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Weights [batch, heads, i, j] times x [batch, j, heads, dim], summed over the j that are visible: [batch, i, heads, dim].

    What isn't visible has no part in the sum, so that a weight of 0 needn't be multiplied by a NaN.
    """
    finite = np.isfinite(x).all(axis=(0, 2, 3))
    total = np.einsum("bhij,bjhd->bihd", weights, np.where(finite[:, None, None], x, 0))
    for j in np.flatnonzero(~finite):
        terms = weights[..., j, None] * x[:, j, :, None]
        total += np.where(visible[..., j, None], terms, 0).swapaxes(1, 2)
    return total


def forward(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, mask: np.ndarray | None,
    bias: np.ndarray | None, soft_cap: float | None, sinks: np.ndarray | None, keep: np.ndarray | None,
    keep_probability: float, score: PlacedScore | None = None,
) -> Forward:  # fmt: skip
    """See reference_attention, which takes the same arguments; a score with its arrays and places."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, q_len, heads, _ = q.shape
    kv_len, group = k.shape[1], heads // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))  # query head h reads kv head h // group
    visible = np.broadcast_to(True if mask is None else np.asarray(mask), (batch, heads, q_len, kv_len))
    # What isn't visible may be NaN or infinite, and has no part in anything.
    raw = np.where(visible, np.einsum("bqhd,bkhd->bhqk", q, k) * scale, 0)
    capped = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    logits = capped if score is None else score.apply(capped)
    if bias is not None:
        logits = logits + np.asarray(bias, np.float64)
    logits = np.where(visible, logits, -np.inf)
    # Sinks are additional logits without a value: [heads], or [heads or kv_heads, sinks].
    extra = np.zeros((heads, 0)) if sinks is None else np.asarray(sinks, np.float64).reshape(len(sinks), -1)
    extra = np.broadcast_to(
        np.repeat(extra, heads // len(extra), axis=0)[:, None], (batch, heads, q_len, extra.shape[1])
    )
    every = np.concatenate([logits, extra], axis=-1)
    shift = every.max(axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(shift), shift, 0)
    exponentials = np.exp(every - shift)
    total = exponentials.sum(axis=-1, keepdims=True)
    probabilities = exponentials / np.where(total == 0, 1, total)  # a row with no visible key is 0
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + shift)[..., 0]
    weights = probabilities[..., :kv_len]
    dropped = weights if keep is None else np.where(keep, weights / keep_probability, 0)
    return Forward(q, k, v, raw, capped, weights, probabilities[..., kv_len:], dropped, lse, visible)


@np.errstate(invalid="ignore", over="ignore")
def reference_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    scale: float,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    keep: np.ndarray | None = None,
    keep_probability: float = 1.0,
    score: Score | None = None,
    captures: Mapping[str, Any] | None = None,
    query_offset: int | np.ndarray = 0,
    key_offset: int = 0,
) -> ReferenceOutput:
    """Attention in float64: query [batch, q, heads, dim], key [batch, kv, kv_heads, dim], value likewise.

    `mask` is True where a query may attend; `mask`, `bias` and `keep` broadcast to [batch, heads, q, kv]. captures: the score's
    arrays by name; query_offset, key_offset: the positions of the first query, a number or [batch], and key, which only the score
    depends on.
    """
    placed = placed_score(score, captures, query_offset, query, key, key_offset)
    terms = forward(query, key, value, scale, mask, bias, soft_cap, sinks, keep, keep_probability, placed)
    return ReferenceOutput(_sums(terms.dropped, terms.visible, terms.value), terms.weights, terms.lse)


@np.errstate(invalid="ignore", over="ignore")
def reference_gradients(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    d_output: np.ndarray,
    d_lse: np.ndarray | None = None,
    *,
    scale: float,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    keep: np.ndarray | None = None,
    keep_probability: float = 1.0,
    score: Score | None = None,
    captures: Mapping[str, Any] | None = None,
    query_offset: int | np.ndarray = 0,
) -> dict[str, np.ndarray]:
    """Gradients of sum(output * d_output) + sum(lse * d_lse): query, key, value, the score's arrays by name, and bias and
    softmax_aux if given."""
    placed = placed_score(score, captures, query_offset, query, key)
    arguments = (scale, mask, bias, soft_cap, sinks, keep, keep_probability, placed)
    q, k, v, raw, capped, weights, sunk, dropped, _, visible = forward(query, key, value, *arguments)
    d_output = np.asarray(d_output, np.float64)
    d_dropped = np.where(visible, np.einsum("bqhd,bkhd->bhqk", d_output, v), 0)
    d_weights = d_dropped if keep is None else np.where(keep, d_dropped / keep_probability, 0)
    inner = (weights * d_weights).sum(axis=-1, keepdims=True)
    through_lse = 0.0 if d_lse is None else np.asarray(d_lse, np.float64)[..., None]
    d_logits = weights * (d_weights - inner + through_lse)
    d_capped, of_score = (d_logits, {}) if placed is None else placed.derivatives(capped, d_logits)
    d_raw = d_capped if soft_cap is None else d_capped * (1 - np.tanh(raw / soft_cap) ** 2)

    kv_heads = np.shape(key)[2]
    by_key = visible.swapaxes(2, 3)
    shared = lambda x: x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).sum(axis=3)  # noqa: E731
    gradients = {
        "query": _sums(d_raw, visible, k) * scale,
        "key": shared(_sums(d_raw.swapaxes(2, 3), by_key, q) * scale),
        "value": shared(_sums(dropped.swapaxes(2, 3), by_key, d_output)),
    }
    gradients |= of_score
    if bias is not None:
        axes = tuple(i for i, n in enumerate(np.shape(bias)) if n == 1)
        gradients["bias"] = d_logits.sum(axis=axes, keepdims=True)
    if sinks is not None:
        d_sunk = (sunk * (through_lse - inner)).sum(axis=(0, 2))
        gradients["softmax_aux"] = d_sunk.reshape(len(sinks), -1, d_sunk.shape[-1]).sum(axis=1).reshape(np.shape(sinks))
    return gradients
