"""Products of queries and keys, weighted by how far the state decays between them.

A ratio of decays is the exponential of a sum of log decays over the tokens between two, never a quotient, and never the
difference of two sums from the start of a chunk: steps of e^-30 would overflow the one and leave no digits of the other. So a
chunk is halved until one token is left: between a token of a second half and one of the first, the log decay is what is summed up
from the middle to each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "Kept", "decayed_products", "from_start", "from_start_gradient", "kept_of", "log_ratios", "sums_of", "to_end",
    "to_end_gradient",
]  # fmt: skip


_FORGOTTEN = -1e4  # exp of it is 0 in float32, and so is that of any sum with it
_LEAST_PRODUCT = 16


class Kept(NamedTuple):
    """A decay as a sum: itself and 0, or if it is near 1, that and what it takes away, which so keeps its digits: rounded beside
    the 1, a decay that is the same for every chunk would err in the same direction each time."""

    most: jax.Array
    rest: jax.Array

    @property
    def whole(self) -> jax.Array:
        """The decay in float32."""
        return self.most + self.rest

    def of(self, state: jax.Array, added: jax.Array) -> jax.Array:
        """The state decayed, and what is added."""
        return self.most * state + (self.rest * state + added)

    def times(self, factor: jax.Array) -> Kept:
        """Both times 0 or 1."""
        return Kept(self.most * factor, self.rest * factor)


def kept_of(log_decay: jax.Array) -> Kept:
    """The decay of a log decay in float32."""
    near = log_decay > np.float32(-1 / 16)
    few = jnp.where(near, log_decay, 0)
    # e^x - 1 as its series, which is x in brackets: kernels have no expm1.
    series = jnp.ones_like(few)
    for n in range(6, 1, -1):
        series = 1 + few * series / np.float32(n)
    return Kept(jnp.where(near, np.float32(1), jnp.exp(log_decay)), few * series)


def from_start(log_decay: jax.Array) -> jax.Array:
    """The sum of log decays [..., tokens, channels] from the first token to each, its own included."""
    if _few(log_decay):
        return jnp.cumsum(log_decay, axis=-2)
    return sums_of(log_decay, np.tri(log_decay.shape[-2], dtype=np.float32))


def from_start_gradient(gradient: jax.Array) -> jax.Array:
    """The gradient of the log decays of `from_start` from that of their sums."""
    if _few(gradient):
        return lax.cumsum(gradient, axis=gradient.ndim - 2, reverse=True)
    return _times(np.tri(gradient.shape[-2], dtype=np.float32).T, gradient)


def to_end_gradient(gradient: jax.Array) -> jax.Array:
    """The gradient of the log decays of `to_end` from that of their sums."""
    if _few(gradient):
        return jnp.cumsum(gradient, axis=-2) - gradient
    return _times(np.tri(gradient.shape[-2], k=-1, dtype=np.float32), gradient)


def to_end(log_decay: jax.Array) -> jax.Array:
    """The sum of log decays [..., tokens, channels] after each token."""
    size = log_decay.shape[-2]
    if not _few(log_decay):
        return sums_of(log_decay, np.tri(size, k=-1, dtype=np.float32).T)
    later = lax.slice_in_dim(log_decay, 1, size, axis=-2)
    padded = jnp.concatenate([later, jnp.zeros_like(lax.slice_in_dim(log_decay, 0, 1, axis=-2))], -2)
    return lax.cumsum(padded, axis=log_decay.ndim - 2, reverse=True)


def _few(log_decay: jax.Array) -> bool:
    """Whether sums take less than a product with ones."""
    return log_decay.shape[-1] == 1 or log_decay.shape[-2] < _LEAST_PRODUCT


def sums_of(log_decay: jax.Array, ones: np.ndarray) -> jax.Array:
    """Of log decays [..., tokens, channels] the sum of those that each row of ones names, each by itself."""
    return _times(ones, _known(log_decay))


def _times(ones: np.ndarray, x: jax.Array) -> jax.Array:
    """The product of a constant matrix with each matrix of x."""
    each = jnp.broadcast_to(ones, (*x.shape[:-2], *ones.shape))
    return jnp.einsum("...ts,...sc->...tc", each, x, precision=lax.Precision.HIGHEST)


def _known(log_decay: jax.Array) -> jax.Array:
    """Log decays without -inf, as 0 times that would be NaN."""
    return jnp.maximum(log_decay, np.float32(_FORGOTTEN))


def log_ratios(log_decay: jax.Array) -> jax.Array:
    """[n, tokens], one log decay per head -> [n, tokens, tokens], from each key's token to each query's: 0 on the diagonal, -inf
    above it. Each is a sum of its own, as a product with ones."""
    size = log_decay.shape[1]
    until, after = np.tri(size, dtype=bool), np.tri(size, k=-1, dtype=np.float32)
    terms = jnp.where(until[None], _known(log_decay)[:, None, :], 0)
    sums = jnp.einsum("nit,tj->nij", terms, after, precision=lax.Precision.HIGHEST)
    return jnp.where(until[None], sums, -np.inf)


def decayed_products(
    rows: tuple[jax.Array, ...], columns: jax.Array, log_decay: jax.Array, precision: lax.Precision
) -> list[jax.Array]:
    """For each array of rows [..., tokens, tokens]: of a row and an earlier column, or its own, the sum over channels of row *
    column * the decay between them. rows, columns [..., tokens, dim]; log_decay [..., tokens, dim or 1], whose other sizes may be
    greater.

    0 above the diagonal. The number of tokens is a power of two.
    """
    *outer, size, channels = log_decay.shape
    if channels == 1:
        ratios = jnp.exp(log_ratios(log_decay.reshape(-1, size))).reshape(*outer, size, size)
        plain = jnp.einsum("...id,...jd->...ij", jnp.concatenate(rows, -2), columns, precision=precision)
        return [part * ratios for part in jnp.split(plain, len(rows), -2)]

    def flat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, log_decay.shape).reshape(-1, size, channels)

    made = (_by_channel(flat(x), flat(columns), flat(log_decay), precision) for x in rows)
    return [x.reshape(*outer, size, size) for x in made]


def _by_channel(rows: jax.Array, columns: jax.Array, log_decay: jax.Array, precision: lax.Precision) -> jax.Array:
    """[n, tokens, dim] each -> [n, tokens, tokens]."""
    count, size, dim = rows.shape
    if size == 1:
        return jnp.einsum("nid,njd->nij", rows, columns, precision=precision)
    half = size // 2
    halved = [x.reshape(2 * count, half, dim) for x in (rows, columns, log_decay)]
    inner = _by_channel(halved[0], halved[1], halved[2], precision)
    row = rows[:, half:] * jnp.exp(from_start(log_decay[:, half:]))
    column = columns[:, :half] * jnp.exp(to_end(log_decay[:, :half]))
    return _joined(inner, jnp.einsum("nid,njd->nij", row, column, precision=precision), 0)


def _joined(inner: jax.Array, below: jax.Array, above: float) -> jax.Array:
    """[2n, half, half] on the diagonal, first halves beside second ones, and [n, half, half] below it -> [n, size, size]."""
    count, half = below.shape[:2]
    pairs = inner.reshape(count, 2, half, half)
    first = jnp.concatenate([pairs[:, 0], jnp.full_like(below, above)], 2)
    return jnp.concatenate([first, jnp.concatenate([below, pairs[:, 1]], 2)], 1)
