"""Attention written out in jax.numpy, with the logits built whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

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
) -> tuple[Array, Array, Array]:
    """Return (output in the layout, weights [batch, heads, q, kv], lse [batch, heads, q]).

    `mask` is True where a query may attend. Query heads are a multiple of kv heads and share them in order. Fully masked
    rows give output 0, weights 0, lse -inf and zero gradients.
    """
    axis = layout.index("h")
    heads, kv_heads = query.shape[axis], key.shape[axis]
    group = heads // kv_heads
    compute = _compute_dtype(query.dtype)
    grouped = (*query.shape[:axis], kv_heads, group, *query.shape[axis + 1 :])
    q, k, v = query.reshape(grouped).astype(compute), key.astype(compute), value.astype(compute)
    queries, keys = ("btkgd", "bskd") if layout == "bthd" else ("bkgtd", "bksd")

    logits = jnp.einsum(f"{queries},{keys}->bkgts", q, k, preferred_element_type=softmax_dtype) * scale
    logits = logits.astype(softmax_dtype)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + _grouped(bias.astype(softmax_dtype), kv_heads, group)
    if mask is not None:
        logits = jnp.where(_grouped(mask, kv_heads, group), logits, -jnp.inf)

    # The result doesn't depend on the shift, so the gradient needn't go through it. A row of -inf keeps shift 0: its
    # exponentials are then 0 instead of NaN.
    shift = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(softmax_dtype).reshape(kv_heads, group, 1, 1)
        shift = jnp.maximum(shift, jax.lax.stop_gradient(sinks))
    shift = jnp.where(jnp.isfinite(shift), shift, 0)
    exponentials = jnp.exp(logits - shift)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    dead = total == 0
    safe = jnp.where(dead, 1, total)
    weights = exponentials / safe
    lse = jnp.where(dead, -jnp.inf, jnp.log(safe) + shift)[..., 0]

    kept = weights
    if keep is not None:
        kept = jnp.where(_grouped(keep, kv_heads, group), weights / keep_probability, 0)
    output = jnp.einsum(f"bkgts,{keys}->{queries}", kept.astype(compute), v, preferred_element_type=softmax_dtype)
    batch, q_len, kv_len = logits.shape[0], logits.shape[-2], logits.shape[-1]
    output = output.astype(query.dtype).reshape(*query.shape[:-1], value.shape[-1])
    return output, weights.reshape(batch, heads, q_len, kv_len), lse.reshape(batch, heads, q_len)


def _compute_dtype(dtype: np.dtype) -> np.dtype:
    # XLA:CPU has no float16 dot with a float32 result ("F16_F16_F32 not supported"); the cast up is exact.
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _grouped(x: Array | np.ndarray, kv_heads: int, group: int) -> Array | np.ndarray:
    """[b, h or 1, q, kv] -> [b, kv_heads or 1, group or 1, q, kv]."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], kv_heads, group, *x.shape[2:])
