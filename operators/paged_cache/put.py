"""put: write rows of an array, and pass over those out of range; the rest of the array is not touched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["put"]


def put(array: jax.Array, index: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
    """`array.at[index].set(rows, mode="drop")` for indices of the first dimensions, of which none is below 0.

    XLA:CPU writes small floats in float32, and converts the whole array there and back, so there their bits are written. That
    still copies the array: 0.9 s for 2 x 256 MiB of bfloat16 in the place of 1.6 s, where float32 and int8 take 0.2 ms.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize >= 4:
        return _scatter(array, rows, *index)
    return lax.platform_dependent(array, rows, *index, cpu=_scatter_bits, default=_scatter)


def _scatter(array: jax.Array, rows: jax.Array, *index: jax.Array) -> jax.Array:
    return array.at[index].set(rows, mode="drop")


def _scatter_bits(array: jax.Array, rows: jax.Array, *index: jax.Array) -> jax.Array:
    bits = jnp.uint16 if array.dtype.itemsize == 2 else jnp.uint8
    whole, own = (lax.bitcast_convert_type(x, bits) for x in (array, rows.astype(array.dtype)))
    return lax.bitcast_convert_type(whole.at[index].set(own, mode="drop"), array.dtype)
