"""What the TPU kernels of linear attention compute inside a chunk: products without loss, products with the decay between two
tokens, the triangular inverse, and the gradients of these."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ...kernels.precision import exact
from .decays import Kept, kept_of

__all__ = [
    "Decayed", "Square", "as_column", "as_row", "by_channel", "by_channel_gradients", "by_head", "by_head_gradients", "dot",
    "square_of", "unit_inverse", "unit_solve", "wide_dot",
]  # fmt: skip

_ROWS = 8  # of a block that is inverted by forward substitution: those of a register
_DEPTH = 128  # numbers that are summed up in half a matrix unit of v6e and tpu7x


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype: Any = jnp.float32) -> jax.Array:
    """A product over an axis of each, of factors in a dtype, summed in float32."""
    dims = (((a_axis,), (b_axis,)), ((), ()))
    a, b = a.astype(dtype), b.astype(dtype)
    return lax.dot_general(a, b, dims, precision=exact(dtype), preferred_element_type=jnp.float32)


def _parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Float32 as a sum of numbers of bfloat16, three of which are all of it. Bits are cut off, as a compiler may leave out a
    conversion there and back."""
    found = []
    for _ in range(count):
        part = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & np.int32(-65536), jnp.float32)
        found.append(part.astype(jnp.bfloat16))
        x = x - part
    return found


def wide_dot(a: jax.Array, b: jax.Array, dtype: Any, a_axis: int = 1) -> jax.Array:
    """A product of float32: without loss if dtype is that, else with 16 bits of each factor, twice what bfloat16 has."""
    if dtype != jnp.bfloat16:
        return dot(a, b, a_axis, 0)
    (high, low), (other, rest) = _parts(a, 2), _parts(b, 2)
    if a_axis == 1 and b.shape[0] % _DEPTH == 0:  # both small products are one
        small = dot(jnp.concatenate([high, low], 1), jnp.concatenate([rest, other], 0), 1, 0, dtype)
    else:
        small = dot(high, rest, a_axis, 0, dtype) + dot(low, other, a_axis, 0, dtype)
    return small + dot(high, other, a_axis, 0, dtype)


class Square(NamedTuple):
    """The places of a square matrix: of a token's row, and of an earlier or later one's column."""

    row: jax.Array
    column: jax.Array

    def below(self, half: int) -> jax.Array:
        """Whether a row is of a second half, and its column of the first half of the same block of two halves."""
        shift = half.bit_length() - 1
        row, column = self.row >> shift, self.column >> shift
        return (row == column + 1) & (row & 1 == 1)


def square_of(size: int) -> Square:
    """The places of a square matrix of that many rows."""
    return Square(*(lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1)))


def as_column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    square = square_of(row.shape[1])
    return jnp.sum(jnp.where(square.row == square.column, row, 0.0), 1, keepdims=True)


def as_row(column: jax.Array) -> jax.Array:
    """[n, 1] -> [1, n]."""
    square = square_of(column.shape[0])
    return jnp.sum(jnp.where(square.row == square.column, column, 0.0), 0, keepdims=True)


class Decayed(NamedTuple):
    """products [n tokens, tokens]: for each of n arrays of rows, those of a row and an earlier column, or its own, with the decay
    between them; above the diagonal anything. started, ended [tokens, 1 or dim]: the decays from the start of the chunk to a
    token, and from there to its end. kept: [1 or dim, 1] over the whole chunk. ratio: between two tokens, if channels have none
    of their own."""

    products: jax.Array
    started: jax.Array
    ended: jax.Array
    kept: Kept
    ratio: jax.Array | None = None


def _repeated(x: jax.Array, like: jax.Array) -> jax.Array:
    """x as often as rows of one chunk are in `like`."""
    count = like.shape[0] // x.shape[0]
    return x if count == 1 else jnp.concatenate([x] * count, 0)


def by_head(rows: jax.Array, columns: jax.Array, decay: jax.Array, square: Square) -> Decayed:
    """rows [n tokens, dim], columns [tokens, dim], decay [1, tokens]. Each log decay is a sum over the tokens between."""
    row, column = square
    until = jnp.where(column <= row, decay, 0.0)
    later = (row > column).astype(jnp.float32)
    parts = (jnp.where(column <= row, part.astype(jnp.float32), 0.0) for part in _parts(decay, 3))
    high, middle, low = (dot(part, later, 1, 0, jnp.bfloat16) for part in parts)
    ratio = jnp.exp(low + middle + high)
    started = jnp.exp(jnp.sum(until, 1, keepdims=True))
    ended = jnp.exp(jnp.sum(jnp.where(column > row, decay, 0.0), 1, keepdims=True))
    kept = kept_of(jnp.sum(decay, 1, keepdims=True))
    products = dot(rows, columns, 1, 1, rows.dtype) * _repeated(ratio, rows)
    return Decayed(products, started, ended, kept, ratio)


def by_head_gradients(
    rows: jax.Array,
    columns: jax.Array,
    made: Decayed,
    square: Square,
    d_products: jax.Array,
    d_started: jax.Array,
    d_ended: jax.Array,
    d_kept: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of rows, columns and decay [1, tokens]. d_products: 0 above the diagonal; d_started, d_ended [tokens, 1] and
    d_kept [1, 1]: of the logarithms."""
    row, column = square
    size, dtype = columns.shape[0], rows.dtype
    assert made.ratio is not None
    d_plain = d_products * _repeated(made.ratio, rows)
    d_rows, d_columns = dot(d_plain, columns, 1, 0, dtype), dot(d_plain, rows, 0, 0, dtype)
    both = d_products * made.products
    between = _added(both, size)
    # Of a row's log decay at a token between it and a column: what all columns before the token have.
    later = (row > column).astype(jnp.float32)
    high, middle, low = (dot(part, later, 1, 1, jnp.bfloat16) for part in _parts(between, 3))
    of_rows = jnp.where(column <= row, low + middle + high + d_started, 0.0)
    of_columns = jnp.where(row < column, d_ended, 0.0)
    return d_rows, d_columns, jnp.sum(of_rows + of_columns, 0, keepdims=True) + d_kept


class _Halves(NamedTuple):
    """Log decays [tokens, dim] from the middle of each block of twice `half` tokens: in a second half up to a token, in a first
    half those after it."""

    half: int
    logs: jax.Array
    second: jax.Array


def _by_halves(decay: jax.Array) -> tuple[list[_Halves], jax.Array, jax.Array]:
    """(those of every block that is halved, smallest first; the sums up to a token and after it). What a block of tokens sums up
    to is, at each of them, the sum up to it and after it: a block of twice as many adds what its other half sums up to."""
    size = decay.shape[0]
    place = lax.broadcasted_iota(jnp.int32, decay.shape, 0)
    until, after, found, half = decay, jnp.zeros_like(decay), [], 1
    while half < size:
        second = (place & half) != 0
        found.append(_Halves(half, jnp.where(second, until, after), second))
        whole = until + after
        until = until + jnp.where(second, pltpu.roll(whole, half, 0), 0.0)
        after = after + jnp.where(second, 0.0, pltpu.roll(whole, size - half, 0))
        half *= 2
    return found, until, after


def _by_halves_gradient(
    halves: list[_Halves], d_logs: list[jax.Array], d_until: jax.Array, d_after: jax.Array
) -> jax.Array:
    """The gradient of decay in _by_halves."""
    size = d_until.shape[0]
    for (half, _, second), d_log in zip(reversed(halves), reversed(d_logs), strict=True):
        d_whole = pltpu.roll(jnp.where(second, d_until, 0.0), size - half, 0)
        d_whole = d_whole + pltpu.roll(jnp.where(second, 0.0, d_after), half, 0)
        d_until = d_until + d_whole + jnp.where(second, d_log, 0.0)
        d_after = d_after + d_whole + jnp.where(second, 0.0, d_log)
    return d_until


def by_channel(rows: jax.Array, columns: jax.Array, decay: jax.Array, square: Square) -> Decayed:
    """As by_head, of decays [tokens, dim]: by halves, with the log decays from the middle of each block of tokens."""
    dtype = rows.dtype
    rows, columns = rows.astype(jnp.float32), columns.astype(jnp.float32)
    own = jnp.sum(rows * _repeated(columns, rows), 1, keepdims=True)
    products = jnp.where(_repeated(square.row == square.column, rows), own, 0.0)
    halves, until, after = _by_halves(decay)
    for half, logs, _ in halves:
        kept = jnp.exp(logs)
        level = dot(rows * _repeated(kept, rows), columns * kept, 1, 1, dtype)
        products = jnp.where(_repeated(square.below(half), rows), level, products)
    whole = Kept(*map(as_column, kept_of(jnp.sum(decay, 0, keepdims=True))))
    return Decayed(products, jnp.exp(until), jnp.exp(after), whole)


def by_channel_gradients(
    rows: jax.Array,
    columns: jax.Array,
    decay: jax.Array,
    square: Square,
    d_products: jax.Array,
    d_started: jax.Array,
    d_ended: jax.Array,
    d_kept: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As by_head_gradients, of decays [tokens, dim]; d_started, d_ended [tokens, dim], d_kept [1, dim]."""
    size, dtype = columns.shape[0], rows.dtype
    rows, columns = rows.astype(jnp.float32), columns.astype(jnp.float32)
    own = jnp.sum(jnp.where(_repeated(square.row == square.column, rows), d_products, 0.0), 1, keepdims=True)
    d_rows, d_columns = own * _repeated(columns, rows), _added(own * rows, size)
    halves, *_ = _by_halves(decay)
    d_logs = []
    for half, logs, _ in halves:
        kept = jnp.exp(logs)
        near, columns_near = rows * _repeated(kept, rows), columns * kept
        level = jnp.where(_repeated(square.below(half), rows), d_products, 0.0)
        d_near, d_columns_near = dot(level, columns_near, 1, 0, dtype), dot(level, near, 0, 0, dtype)
        d_rows = d_rows + d_near * _repeated(kept, rows)
        d_columns = d_columns + d_columns_near * kept
        d_logs.append(_added(near * d_near, size) + columns_near * d_columns_near)
    return d_rows, d_columns, _by_halves_gradient(halves, d_logs, d_started, d_ended) + d_kept


def _added(x: jax.Array, size: int) -> jax.Array:
    """[n size, dim] -> [size, dim], the sum over n."""
    return sum((x[n : n + size] for n in range(size, x.shape[0], size)), start=x[:size])


def unit_inverse(strict: jax.Array, square: Square, dtype: Any, block: int | None = None) -> jax.Array:
    """(I + strict)^-1, for all blocks of a size at once: those of a few rows by forward substitution, then by halves as
    unit_triangular.py. With A^-1 and D^-1 on the diagonal of X and B below them, the rows of D^-1 become those of
    [-D^-1 B A^-1, D^-1]. block: leave it at the inverses of blocks of so many rows."""
    size = strict.shape[0]
    found = (square.row == square.column).astype(jnp.float32)
    first = square.row & -_ROWS  # of the block
    for n in range(_ROWS - 1):
        factor = jnp.sum(jnp.where(square.column == first + n, strict, 0.0), 1, keepdims=True)  # 0 up to row n
        row = found.reshape(size // _ROWS, _ROWS, size)[:, n : n + 1]
        found = found - factor * jnp.broadcast_to(row, (size // _ROWS, _ROWS, size)).reshape(size, size)
    half = _ROWS
    while half < (block or size):
        blocks = found.reshape(size // (2 * half), 2, half, size)
        second = blocks[:, 1].reshape(size // 2, size)
        below = jnp.where(square.below(half), strict, 0.0)
        change = wide_dot(wide_dot(second, below, dtype), found, dtype)
        second = (second - change).reshape(size // (2 * half), 1, half, size)
        found = jnp.concatenate([blocks[:, :1], second], 1).reshape(size, size)
        half *= 2
    return found


def unit_solve(strict: jax.Array, values: jax.Array, square: Square, dtype: Any) -> jax.Array:
    """(I + strict)^-1 values, without the inverse's last product: with A^-1 and D^-1 of both halves and B below, A^-1 V of the
    first half and D^-1 (W - B A^-1 V) of the second."""
    half = strict.shape[0] // 2
    if half < _ROWS:
        return wide_dot(unit_inverse(strict, square, dtype), values, dtype)
    blocks = unit_inverse(strict, square, dtype, half)
    first = wide_dot(blocks[:half], values, dtype)
    below = jnp.where(square.below(half), strict, 0.0)[half:]
    left = values[half:] - wide_dot(below, jnp.concatenate([first, values[half:]], 0), dtype)
    return jnp.concatenate([first, wide_dot(blocks[half:], jnp.concatenate([first, left], 0), dtype)], 0)
