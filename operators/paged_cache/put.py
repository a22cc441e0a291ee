"""put: writes rows of an array and skips those out of range; the rest of the array is not touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["put"]


def put(array: jax.Array, index: tuple[Any, ...], rows: jax.Array) -> jax.Array:
    """`array.at[index].set(rows, mode="drop")` for non-negative indices or whole slices.

    XLA:CPU writes small floats as float32, converting the whole array there and back, so on CPU their bits are written instead.
    That still copies the array, once.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize >= 4:
        return _scatter(array, rows, *index)
    ids = [x for x in index if not isinstance(x, slice)]  # slices aren't operands
    at = [isinstance(x, slice) for x in index]

    def whole(ids: Sequence[jax.Array]) -> tuple[Any, ...]:
        left = iter(ids)
        return tuple(slice(None) if is_slice else next(left) for is_slice in at)

    def scatter(array: jax.Array, rows: jax.Array, *ids: jax.Array) -> jax.Array:
        return _scatter(array, rows, *whole(ids))

    def scatter_bits(array: jax.Array, rows: jax.Array, *ids: jax.Array) -> jax.Array:
        bits = jnp.uint16 if array.dtype.itemsize == 2 else jnp.uint8
        stored, row_bits = (lax.bitcast_convert_type(x, bits) for x in (array, rows.astype(array.dtype)))
        return lax.bitcast_convert_type(_scatter(stored, row_bits, *whole(ids)), array.dtype)

    return lax.platform_dependent(array, rows, *ids, cpu=scatter_bits, default=scatter)


def _scatter(array: jax.Array, rows: jax.Array, *index: Any) -> jax.Array:
    return array.at[index].set(rows, mode="drop")
