"""Means and extremes of the keys of each block, of those that exist."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ...kernels.primitives import numbers

__all__ = ["block_extremes", "block_means", "key_counts"]


def key_counts(kv_lengths: Int[Array, " batch"] | None, batch: int, kv_len: int) -> Int[Array, " batch"]:
    """The number of keys of each row of the batch, int32, no more than kv_len."""
    if kv_lengths is None:
        return jnp.full((batch,), kv_len, jnp.int32)
    return jnp.minimum(kv_lengths.astype(jnp.int32), np.int32(kv_len))


def block_means(
    key: Float[Array, "batch kv_len heads dim"], block_kv: int, kv_lengths: Int[Array, " batch"] | None = None
) -> Float[Array, "batch kv_blocks heads dim"]:
    """The mean of each block's keys, summed in float32, in their dtype; 0 for a block without keys."""
    parts, real = _blocks(key, block_kv, kv_lengths)
    count = jnp.maximum(real.sum(2), 1).astype(jnp.float32)
    total = jnp.where(real, parts.astype(jnp.float32), 0).sum(2)
    return (total / count).astype(key.dtype)


def block_extremes(
    key: Float[Array, "batch kv_len heads dim"], block_kv: int, kv_lengths: Int[Array, " batch"] | None = None
) -> tuple[Float[Array, "batch kv_blocks heads dim"], Float[Array, "batch kv_blocks heads dim"]]:
    """(least, greatest) of each column over a block's keys; 0 for a block without keys."""
    parts, real = _blocks(key, block_kv, kv_lengths)
    some = jnp.broadcast_to(real.any(2), (*parts.shape[:2], *parts.shape[3:]))
    infinite = jnp.asarray(jnp.inf, key.dtype)
    least, most = jnp.where(real, parts, infinite).min(2), jnp.where(real, parts, -infinite).max(2)
    zero = jnp.zeros_like(least)
    return jnp.where(some, least, zero), jnp.where(some, most, zero)


def _blocks(
    key: Array, block_kv: int, kv_lengths: Array | None
) -> tuple[Float[Array, "batch kv_blocks block_kv heads dim"], Bool[Array, "batch kv_blocks block_kv 1 1"]]:
    batch, kv_len, heads, dim = key.shape
    blocks = -(-kv_len // block_kv)
    padded = jnp.pad(key, ((0, 0), (0, blocks * block_kv - kv_len), (0, 0), (0, 0)))
    real = numbers((1, blocks * block_kv), 1) < key_counts(kv_lengths, batch, kv_len)[:, None]
    return padded.reshape(batch, blocks, block_kv, heads, dim), real.reshape(batch, blocks, block_kv, 1, 1)
