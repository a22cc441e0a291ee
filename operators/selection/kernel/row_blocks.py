"""Blocks of an array along its second axis, read and written in place: nothing is padded, though the last one may be short."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...kernels.primitives import cut, numbers, put

__all__ = ["block_of", "long_enough", "put_block"]


def long_enough(x: jax.Array, size: int) -> jax.Array:
    """x [batch, length, ...] with at least one whole block."""
    short = size - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2)) if short > 0 else x


def block_of(x: jax.Array, row: Any, number: Any, size: int) -> jax.Array:
    """A block [size, ...] of a row of x [batch, length, ...], length >= size; what lies beyond the end is any of the others."""
    if x.dtype.itemsize == 2:  # else XLA:CPU converts all of it to float32 before the loop
        x, row, number = lax.optimization_barrier((x, row, number))
    start, late = _start(x, number, size)
    part = lax.squeeze(cut(x, (row, start, *_zeros(x)), (1, size, *x.shape[2:])), (0,))
    return part if late is None else _rolled(part, late)


def put_block(x: jax.Array, part: jax.Array, row: Any, number: Any) -> jax.Array:
    """x with that block replaced; what lies beyond the end is dropped."""
    size = part.shape[0]
    start, late = _start(x, number, size)
    at = (row, start, *_zeros(x))
    if late is not None:
        before = lax.squeeze(cut(x, at, (1, *part.shape)), (0,))
        kept = numbers((size, *(1,) * (part.ndim - 1)), 0) < late
        part = jnp.where(jnp.broadcast_to(kept, part.shape), before, _rolled(part, size - late))
    return put(x, part[None], at)


def _start(x: jax.Array, number: Any, size: int) -> tuple[Any, Any]:
    """Where to read a block, and how many rows before its own first one that is; None if always 0."""
    start = number * size
    if x.shape[1] % size == 0:
        return start, None
    clamped = jnp.minimum(jnp.asarray(start, jnp.int32), np.int32(x.shape[1] - size))
    return clamped, start - clamped


def _rolled(part: jax.Array, first: Any) -> jax.Array:
    """The rows from `first` on, then those before."""
    doubled = jnp.concatenate([part, part])
    return cut(doubled, (first, *(0,) * (part.ndim - 1)), part.shape)


def _zeros(x: jax.Array) -> tuple[int, ...]:
    return (0,) * (x.ndim - 2)
