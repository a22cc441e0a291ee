"""Merges log-sum-exps, with -inf for an empty sum: exp(-inf - -inf) is NaN, and so is the gradient of log 0."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .primitives import where

__all__ = ["divisor", "log_of_sum", "logsumexp", "shift_of"]


def shift_of(*logits: jax.Array) -> jax.Array:
    """What to subtract before taking exponentials: the greatest, elementwise, or 0 where all are -inf and the exponentials are 0.

    A log-sum-exp doesn't depend on its shift, so no gradient goes through it.
    """
    greatest = functools.reduce(jnp.maximum, (lax.stop_gradient(x) for x in logits))
    return where(greatest != -jnp.inf, greatest, 0)


def divisor(total: jax.Array) -> jax.Array:
    """A sum of exponentials to divide by: 1 where it is 0, because there is nothing to divide."""
    return where(total != 0, total, 1)


def log_of_sum(total: jax.Array, shift: jax.Array) -> jax.Array:
    """log(total) + shift, where `total` is a sum of exp(x - shift); -inf, with gradient 0, where that is 0."""
    return where(total != 0, jnp.log(divisor(total)) + shift, -jnp.inf)


def logsumexp(x: jax.Array) -> jax.Array:
    """Log-sum-exp over the last axis. jax.nn's gradient of a row of -inf is NaN; here it is 0."""
    shift = shift_of(jnp.max(lax.stop_gradient(x), axis=-1))
    return log_of_sum(jnp.exp(x - shift[..., None]).sum(-1), shift)
