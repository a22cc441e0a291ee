"""Log-sum-exps, with -inf for an empty sum, and what is merged by them: exp(-inf - -inf) is NaN, and so is log 0's gradient."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .primitives import where

__all__ = [
    "LN2",
    "LOG2E",
    "by_row",
    "combine_by_lse",
    "combine_over_devices",
    "divisor",
    "divisor_and_lse",
    "log_of_sum",
    "logsumexp",
    "merge_stacked",
    "shift_of",
    "subtracted",
]


LN2, LOG2E = math.log(2), 1 / math.log(2)


def subtracted(greatest: jax.Array) -> jax.Array:
    """What to subtract from logits before taking exponentials: the greatest, or 0 where it is -inf and these are 0, not NaN."""
    return where(greatest != -jnp.inf, greatest, 0)


def shift_of(*logits: jax.Array) -> jax.Array:
    """The same of several arrays' elements. A log-sum-exp doesn't depend on its shift, so no gradient goes through it."""
    return subtracted(functools.reduce(jnp.maximum, (lax.stop_gradient(x) for x in logits)))


def divisor(total: jax.Array) -> jax.Array:
    """A sum of exponentials to divide by: 1 where it is 0, because there is nothing to divide."""
    return where(total != 0, total, 1)


def divisor_and_lse(total: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(divisor(total), log(total) + shift), where `total` is a sum of exp(x - shift); -inf, with gradient 0, where that is 0."""
    alive = total != 0
    safe = where(alive, total, 1)
    return safe, where(alive, jnp.log(safe) + shift, -jnp.inf)


def log_of_sum(total: jax.Array, shift: jax.Array) -> jax.Array:
    """The second of divisor_and_lse."""
    return divisor_and_lse(total, shift)[1]


def logsumexp(x: jax.Array) -> jax.Array:
    """Log-sum-exp over the last axis. jax.nn's gradient of a row of -inf is NaN; here it is 0."""
    shift = shift_of(jnp.max(lax.stop_gradient(x), axis=-1))
    return log_of_sum(jnp.exp(x - shift[..., None]).sum(-1), shift)


# -- outputs over parts of the keys ------------------------------------------------------------------------------------
# Each returns (output, lse) over the keys of all parts, the output in the parts' dtype. layout: that of outputs beside an lse
# [batch, heads, q]; None if both have the same leading axes. A row without visible keys in any part stays 0 and -inf.


def by_row(x: jax.Array, layout: str | None = None) -> jax.Array:
    """A number per row, reshaped to multiply an output."""
    return (x.swapaxes(-1, -2) if layout == "bthd" else x)[..., None]


def combine_by_lse(
    parts: Sequence[tuple[jax.Array, jax.Array]], layout: str | None = None, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Of (output, lse) of each part. Sinks, [heads], are a part without values."""
    outputs, lses = zip(*parts, strict=True)
    greatest, total = partial(functools.reduce, jnp.maximum), partial(functools.reduce, operator.add)
    return _merged(outputs, lses, greatest, total, layout, sinks)


def merge_stacked(output: jax.Array, lse: jax.Array, layout: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Of arrays with the parts along a first axis."""
    return _merged(output, lse, lambda x: x.max(0), lambda x: x.sum(0), layout, None)


def combine_over_devices(
    output: jax.Array, lse: jax.Array, axes: tuple[str, ...], layout: str | None = None, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Inside a shard_map, of the devices along some axes. Sinks count once, not once a device."""
    return _merged(output, lse, lambda x: lax.pmax(x, axes), lambda x: lax.psum(x, axes), layout, sinks)


def _merged(
    outputs: Any,
    lses: Any,
    greatest: Callable[[Any], jax.Array],
    total: Callable[[Any], jax.Array],
    layout: str | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """outputs, lses: an array, or a tuple of one for each part; greatest, total: its elements' over the parts."""
    dtype = jax.tree.leaves(outputs)[0].dtype
    shift = greatest(lax.stop_gradient(lses))
    if sinks is not None:
        sinks = sinks[None, :, None].astype(shift.dtype)
    shift = shift_of(shift) if sinks is None else shift_of(shift, sinks)
    shares = jax.tree.map(lambda lse: jnp.exp(lse - lax.expand_dims(shift, range(lse.ndim - shift.ndim))), lses)
    weighted = total(jax.tree.map(lambda x, share: x.astype(share.dtype) * by_row(share, layout), outputs, shares))
    whole = total(shares)
    if sinks is not None:
        whole = whole + jnp.exp(sinks - shift)
    divided, lse = divisor_and_lse(whole, shift)
    return (weighted / by_row(divided, layout)).astype(dtype), lse
