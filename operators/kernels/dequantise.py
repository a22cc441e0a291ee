"""Keys and values in int8 or fp8: the values they stand for, and their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .default_promotion import wider

__all__ = ["dequantised", "quantised_gradients"]


def dequantised(x: jax.Array, scale: jax.Array | None, layout: str, dtype: Any) -> jax.Array:
    """Return [batch, kv, heads, dim] (bthd) or [batch, heads, kv, dim] (bhtd) in `dtype`, times a scale [batch, heads, kv].

    The product is computed in float32, then rounded once. An array of this dtype without a scale is returned unchanged.
    """
    if scale is None:
        return x.astype(dtype)  # int8 and fp8 are exact in bfloat16
    rows = scale if layout == "bhtd" else scale.swapaxes(1, 2)
    return (x.astype(jnp.float32) * rows[..., None]).astype(dtype)


def quantised_gradients(x: jax.Array, scale: jax.Array | None, gradient: jax.Array) -> tuple[Any, jax.Array | None]:
    """(cotangent of x, of its scale) from that of `dequantised`, all [batch, heads, kv, dim]; integers have none.

    The cotangent of an fp8 array is rounded to fp8, as its dtype requires. Where the gradient is 0, as it is for a key that
    no query sees, both are 0, whatever the array and its scale hold.
    """
    d_scale = None
    if scale is not None:
        d_scale = _times(gradient.astype(jnp.float32), x.astype(jnp.float32)).sum(-1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return np.zeros(x.shape, jax.dtypes.float0), d_scale
    if scale is not None:
        wide = wider(gradient.dtype, scale.dtype)
        gradient = _times(gradient.astype(wide), scale.astype(wide)[..., None])
    return gradient.astype(x.dtype), d_scale


def _times(gradient: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(gradient == 0, 0, gradient * x)
