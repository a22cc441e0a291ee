"""Zigzag order: of 2n chunks of a sequence, device k of n has the k-th from the start and the k-th from the end.

Under a causal mask this gives every device the same amount of work, also at each step of a ring. Each chunk has one
destination, so two permutes of half an array bring it into this order, and two bring it back.

Source: "The Llama 3 Herd of Models" (2024), context parallelism.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..call.local import Ring

__all__ = ["contiguous", "zigzag"]


def zigzag(x: jax.Array, ring: Ring, axis: int) -> jax.Array:
    """This device's two chunks, the earlier first, of an array that is split in order along an axis."""
    even, odd = (
        lax.ppermute(half, ring.axes, pairs)
        for half, pairs in zip(jnp.split(x, 2, axis), _destinations(ring.size), strict=True)
    )
    first, last = _swapped(even, odd, ring)
    return jnp.concatenate((first, last), axis)


def contiguous(x: jax.Array, ring: Ring, axis: int) -> jax.Array:
    """The inverse of `zigzag`."""
    first, last = jnp.split(x, 2, axis)
    even, odd = _swapped(first, last, ring)
    back = ([(there, here) for here, there in pairs] for pairs in _destinations(ring.size))
    return jnp.concatenate(
        [lax.ppermute(half, ring.axes, pairs) for half, pairs in zip((even, odd), back, strict=True)], axis
    )


def _destinations(size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where the even chunks go, which are the devices' first ones, and where the odd chunks go."""

    def owner(chunk: int) -> int:
        return min(chunk, 2 * size - 1 - chunk)

    return [(d, owner(2 * d)) for d in range(size)], [(d, owner(2 * d + 1)) for d in range(size)]


def _swapped(a: jax.Array, b: jax.Array, ring: Ring) -> tuple[jax.Array, jax.Array]:
    """On devices with an odd index the even chunk is the later one."""
    odd = lax.axis_index(ring.axes) % 2 == 1
    return jnp.where(odd, b, a), jnp.where(odd, a, b)
