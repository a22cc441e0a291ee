"""How far a result is from the reference, row by row: the measure of the published tolerances.

A row is the last axis: the output of one query and head, or the gradient of one key and head. Its error is its largest
deviation divided by the row's own size, so small rows are held as tightly as large ones.

A row's size is its largest absolute value, but at least the root of the sum of the squares of the terms that it sums.
This is the floor: rounding errors of terms are independent, so the error of a sum grows with that root even where the terms
cancel. In the first row of a causal mask, for example, the gradient of the query is exactly 0, as the difference of two
nonzero numbers.
Where a soft cap is nearly flat, its slope is such a difference too.

A log-sum-exp is compared number by number, and its size is at least 1: its error is the relative error of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..scores import Score
from .reference import Forward, forward
from .score_reference import placed_score

__all__ = ["lse_size", "output_size", "row_error", "row_sizes", "term_sizes"]

# 1 - tanh**2, the slope of a soft cap, is known to 2e-7 in float32, however small it is: to 6e-6 of this.
_FLAT = 2**-5
_TINY = float(np.finfo(np.float32).tiny)  # smaller values may be flushed to 0


def row_error(got: np.ndarray, want: np.ndarray, sizes: np.ndarray, dtype: Any = np.float32) -> float:
    """The largest |got - want| / size, 0 if there are no values; `sizes` broadcast. Values of `got` that aren't finite are
    infinitely far.

    dtype: the dtype that `got` was stored in; less than its smallest step (6e-8 in float16) is no error.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return np.inf
    excess = np.maximum(np.abs(got - want) - max(_TINY, float(jnp.finfo(dtype).smallest_subnormal)), 0)
    return float((excess / np.maximum(sizes, _TINY)).max(initial=0.0))


def row_sizes(want: np.ndarray, terms: np.ndarray | None = None) -> np.ndarray:
    """[..., 1]: the largest absolute value of each row, or of the same row of `terms` if that is larger."""
    largest = np.abs(want) if terms is None else np.maximum(np.abs(want), terms)
    return np.asarray(largest.max(axis=-1, keepdims=True, initial=0.0))


def lse_size(want: np.ndarray) -> np.ndarray:
    """The size of each number of an lse."""
    return np.maximum(np.abs(want), 1.0)


def output_size(weights: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The root of the sum of squared terms of each output, [batch, q, heads, value_dim].

    weights [batch, heads, q, kv] as they meet the values (after dropout), value [batch, kv, kv_heads, value_dim].
    """
    value = np.repeat(np.asarray(value, np.float64), weights.shape[1] // value.shape[2], axis=2)
    return np.sqrt(np.einsum("bhqk,bkhd->bqhd", weights**2, value**2))


def term_sizes(
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
    """The term sizes of the output and of each gradient of `reference_gradients`, in its shape. Takes the same arguments."""
    placed = placed_score(score, captures, query_offset, query, key)
    terms: Forward = forward(query, key, value, scale, mask, bias, soft_cap, sinks, keep, keep_probability, placed)
    squared_d_output = np.asarray(d_output, np.float64) ** 2
    # d_logits = weights * (d_weights - inner + d_lse), each of which is itself a sum.
    d_weights = np.einsum("bqhd,bkhd->bhqk", squared_d_output, terms.value**2)
    if keep is not None:
        d_weights = np.where(keep, d_weights / keep_probability**2, 0)
    output = np.einsum("bhqk,bkhd->bqhd", terms.dropped, terms.value)
    inner = np.einsum("bqhd,bqhd->bhq", output**2, squared_d_output)[..., None]
    through_lse = 0.0 if d_lse is None else np.asarray(d_lse, np.float64)[..., None] ** 2
    d_logits = terms.weights**2 * (d_weights + inner + through_lse)
    d_raw, of_score = (d_logits, {}) if placed is None else placed.squares(terms.capped, d_logits)
    if soft_cap is not None:
        d_raw = d_raw * np.maximum(1 - np.tanh(terms.raw / soft_cap) ** 2, _FLAT) ** 2

    kv_heads = np.shape(key)[2]
    shared = lambda x: x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).sum(axis=3)  # noqa: E731
    squares = {
        "query": np.einsum("bhqk,bkhd->bqhd", d_raw, terms.key**2) * scale**2,
        "key": shared(np.einsum("bhqk,bqhd->bkhd", d_raw, terms.query**2) * scale**2),
        "value": shared(np.einsum("bhqk,bqhd->bkhd", terms.dropped**2, squared_d_output)),
    }
    squares |= of_score
    if bias is not None:
        axes = tuple(i for i, n in enumerate(np.shape(bias)) if n == 1)
        squares["bias"] = d_logits.sum(axis=axes, keepdims=True)
    if sinks is not None:
        d_sunk = (terms.sunk**2 * (inner + through_lse)).sum(axis=(0, 2))
        squares["softmax_aux"] = d_sunk.reshape(len(sinks), -1, d_sunk.shape[-1]).sum(axis=1).reshape(np.shape(sinks))
    return {"output": output_size(terms.dropped, value)} | {name: np.sqrt(x) for name, x in squares.items()}
