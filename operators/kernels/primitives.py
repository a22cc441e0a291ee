"""Loops, slices, selections and products as single instructions.

What jax.numpy and the defaults of jax.lax add (a function each for `where`, `//` and `%`, five instructions for
an index that may be negative, a second counter and a function for a loop) made up two thirds of the native path's program, and
every layer of a model traces, lowers and compiles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...symbolic import is_symbolic
from .precision import exact

__all__ = [
    "counted", "cut", "cut_along", "dot", "fold", "length", "loop", "numbers", "put", "row_dots", "shifted", "split_index",
    "summed", "where",
]  # fmt: skip


def numbers(shape: tuple[int, ...], axis: int, start: Any = 0, dtype: Any = np.int32) -> jax.Array:
    """start, start + 1, ... along an axis; computed by the program, because an array of them would be as long as the axis."""
    return shifted(lax.broadcasted_iota(dtype, shape, axis), start)


def counted(first: jax.Array, count: int) -> jax.Array:
    """first, first + 1, ...: that many numbers along a new last axis of an int32 array."""
    axis = first.ndim
    return lax.expand_dims(first, (axis,)) + numbers((1,) * axis + (count,), axis)


def shifted(x: Any, by: Any) -> Any:
    """x + by, or x if that is known to be the same."""
    return x if isinstance(by, int) and by == 0 else x + by


def length(n: Any) -> Any:
    """A length to compare or count with: a number, or an int32 scalar for a symbolic one."""
    return jnp.asarray(n, np.int32) if is_symbolic(n) else n


def where(seen: jax.Array | np.ndarray, x: jax.Array, otherwise: float) -> jax.Array:
    """x where `seen`, which broadcasts to x, else a number."""
    if seen.shape != x.shape:
        seen = lax.broadcast_in_dim(seen, x.shape, tuple(range(x.ndim - seen.ndim, x.ndim)))
    return lax.select(seen, x, lax.full_like(x, otherwise))


def dot(a: jax.Array, b: jax.Array, axis: int, dtype: np.dtype) -> jax.Array:
    """The products [..., i, j] of a [..., i, x] and b [..., j, x] or [..., x, j]; `axis` is the axis of x, `dtype` the sum's.

    The factors have one dtype, and none is rounded.
    """
    rows = tuple(range(a.ndim - 2))
    sizes = ((a.ndim - 1,), (axis,)), (rows, rows)
    return lax.dot_general(a, b, sizes, precision=exact(a.dtype), preferred_element_type=dtype)


def row_dots(a: jax.Array, b: jax.Array, platform: str) -> jax.Array:
    """The sums of a * b over the last axis: [...] of two [..., n].

    On a CPU as a product, which takes a fiftieth of the time with jaxlib 0.10.2.
    """
    if platform != "cpu":
        return (a * b).sum(-1)
    rows, last = tuple(range(a.ndim - 1)), a.ndim - 1
    sizes = ((last,), (last,)), (rows, rows)
    return lax.dot_general(a, b, sizes, precision=exact(a.dtype), preferred_element_type=a.dtype)


def summed(x: jax.Array, axis: int) -> jax.Array:
    """The sum over an axis, which is kept with size 1; computed by a product with ones.

    XLA:CPU of jaxlib 0.10.2 loses rows of a sum over more than 256 of them if it fuses it with the products before it
    (jax issue 39103); products are computed correctly.
    """
    # Right factors that are contracted along any but the last dimension are read where they lie, left ones are copied first.
    batch = tuple(range(axis)) if axis < x.ndim - 1 else ()
    ones = lax.full((*x.shape[: len(batch)], x.shape[axis]), 1, x.dtype)
    a, b = (ones, x) if axis < x.ndim - 1 else (x, ones)
    contracted = ((len(batch),), (axis,)) if axis < x.ndim - 1 else ((axis,), (0,))
    sizes = contracted, (batch, batch)
    total = lax.dot_general(a, b, sizes, precision=exact(x.dtype), preferred_element_type=x.dtype)
    return lax.expand_dims(total, (axis,))


def cut(x: jax.Array, starts: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    """A slice at traced positions, none of them negative."""
    return lax.dynamic_slice(x, _indices(starts), sizes, allow_negative_indices=False)


def cut_along(x: jax.Array, start: Any, size: int, axis: int = 0) -> jax.Array:
    """The same along one axis."""
    starts, sizes = [0] * x.ndim, list(x.shape)
    starts[axis], sizes[axis] = start, size
    return cut(x, starts, sizes)


def put(x: jax.Array, part: jax.Array, starts: Sequence[Any]) -> jax.Array:
    """x with a part replaced, at positions that aren't negative."""
    return lax.dynamic_update_slice(x, part, _indices(starts), allow_negative_indices=False)


def split_index(n: Any, size: int, count: int) -> tuple[Any, Any]:
    """(n // size, n % size) for 0 <= n < size * count."""
    if size == 1 or count == 1:
        return (n, 0) if size == 1 else (0, n)
    if is_symbolic(size):
        return lax.div(n, length(size)), lax.rem(n, length(size))
    if isinstance(n, int):
        return divmod(n, size)
    if size & (size - 1) == 0:  # a signed division by a power of two takes ten instructions because of the sign
        return lax.shift_right_logical(n, np.int32(size.bit_length() - 1)), lax.bitwise_and(n, np.int32(size - 1))
    return lax.div(n, np.int32(size)), lax.rem(n, np.int32(size))


def fold(count: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """step(n, carry) for n below a known number; for one step, no loop. jax drops unused parts of the carry."""
    return step(0, carry) if count == 1 else loop(0, count, step, carry)


def loop(first: Any, last: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """step(n, carry) for n from first to last - 1, each known or traced. n is int32, also under jax_enable_x64."""
    return lax.fori_loop(first, last, lambda n, carry: step(_int32(n), carry), carry)


def _indices(starts: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(_int32, starts))


def _int32(n: Any) -> Any:
    """A number as int32: with jax_enable_x64 Python's numbers and loop counters have 64 bits."""
    if isinstance(n, int | np.integer):
        return np.int32(n)
    return n if n.dtype == np.int32 else lax.convert_element_type(n, np.int32)
