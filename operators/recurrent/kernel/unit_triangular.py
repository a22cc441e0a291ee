"""The inverse of a unit lower-triangular matrix, which the delta rule needs once for each chunk."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["unit_inverse"]

_FEW = 4  # products of smaller matrices are sums, which XLA makes in one loop


def unit_inverse(strict: jax.Array) -> jax.Array:
    """(I + strict)^-1 of a strictly lower-triangular matrix [..., n, n], n a power of two, in float32.

    By halves: that of [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. As stable as forward substitution, unlike products
    of powers, whose entries cancel where tokens repeat.
    """
    *outer, size, _ = strict.shape
    return _inverse(strict.reshape(-1, size, size)).reshape(*outer, size, size)


def _inverse(strict: jax.Array) -> jax.Array:
    count, size, _ = strict.shape
    if size == 1:
        return jnp.ones_like(strict)
    half = size // 2
    on_diagonal = jnp.stack([strict[:, :half, :half], strict[:, half:, half:]], 1)
    inner = _inverse(on_diagonal.reshape(2 * count, half, half)).reshape(count, 2, half, half)
    below = -_times(_times(inner[:, 1], strict[:, half:, :half]), inner[:, 0])
    above = jnp.concatenate([inner[:, 0], jnp.zeros_like(below)], 2)
    return jnp.concatenate([above, jnp.concatenate([below, inner[:, 1]], 2)], 1)


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    if (size := a.shape[-1]) <= _FEW:
        return functools.reduce(jnp.add, (a[..., m : m + 1] * b[..., m : m + 1, :] for m in range(size)))
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
