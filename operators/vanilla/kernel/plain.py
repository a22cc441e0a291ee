"""Attention written in jax.numpy, with whole logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from ...kernels.lse import divisor, log_of_sum, shift_of
from ...kernels.primitives import dot, where

__all__ = ["plain_attention"]


def plain_attention(
    query: Shaped[Array, "batch _ _ dim"],
    key: Shaped[Array, "batch _ _ dim"],
    value: Shaped[Array, "batch _ _ value_dim"],
    *,
    layout: str,
    scale: float,
    mask: Bool[Array, "#batch #heads #q #kv"] | np.ndarray | None,
    bias: Float[Array, "#batch #heads #q #kv"] | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    keep: Bool[Array, "batch heads q kv"] | None,
    keep_probability: float,
    softmax_dtype: np.dtype,
    score: Callable[[Array, float], tuple[Array, float]] | None = None,
) -> tuple[Array, Array, Array]:
    """Return (output in the layout, weights [batch, heads, q, kv], lse [batch, heads, q]).

    `mask` is True where a query may attend. Query heads are a multiple of kv heads and share them in order. Fully masked
    rows give output 0, weights 0, lse -inf and zero gradients. score: new logits and their factor from those after the cap.
    """
    # Products in canonical form, [batch, kv heads, rows, dim]: otherwise XLA:CPU would transpose the logits.
    by_head = [x if layout == "bhtd" else x.swapaxes(1, 2) for x in (query, key, value)]
    q, k, v = (x.astype(_compute_dtype(query.dtype)) for x in by_head)
    (batch, heads, q_len, dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    q = q.reshape(batch, kv_heads, heads // kv_heads * q_len, dim)

    logits, factor = dot(q, k, 3, softmax_dtype).reshape(batch, heads, q_len, kv_len), scale
    if soft_cap is not None:
        logits, factor = soft_cap * jnp.tanh(logits * (scale / soft_cap)), 1.0
    if score is not None:
        logits, factor = score(logits, factor)
    if bias is not None:
        logits, factor = logits * factor + bias.astype(softmax_dtype), 1.0
    if factor <= 0:
        logits, factor = logits * factor, 1.0
    if mask is not None:
        logits = where(mask, logits, -jnp.inf)

    shift = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True) * factor
    if sinks is not None:
        sinks = sinks.astype(softmax_dtype)[None, :, None, None]
    shift = shift_of(shift) if sinks is None else shift_of(shift, sinks)
    exponentials = jnp.exp(logits * factor - shift)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    weights = exponentials / divisor(total)
    lse = lax.squeeze(log_of_sum(total, shift), (3,))

    dropped = weights if keep is None else where(keep, weights / keep_probability, 0)
    dropped = dropped.astype(v.dtype).reshape(batch, kv_heads, -1, kv_len)
    output = dot(dropped, v, 2, softmax_dtype).astype(query.dtype).reshape(batch, heads, q_len, value.shape[-1])
    return output if layout == "bhtd" else output.swapaxes(1, 2), weights, lse


def _compute_dtype(dtype: np.dtype) -> np.dtype:
    # XLA:CPU has no float16 dot with a float32 result ("F16_F16_F32 not supported"); the cast up is exact.
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
