"""Linear attention with decay on TPUs: the chunks of kernel/linear.py, with everything of a chunk in VMEM.

A step of the grid works on one chunk of some heads. The state of a head is carried from chunk to chunk in the block of the state
that is returned. A document that starts is a log decay which is exp(0) = 0 in float32, so the kernel knows no documents.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....compat import varying_as
from ...kernels.precision import exact
from ...kernels.varying import vary, varying
from .linear import chunked
from .tpu_sizes import NAME, Sizes, chunk_tokens, heads_per_step

__all__ = ["chunked_tpu"]

_ROWS = 8  # of a block that is inverted by forward substitution: those of a register
_FORGOTTEN = -200.0  # exp of it is 0 in float32, and so is that of any sum with it


def chunked_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    initial_state: jax.Array | None,
    document: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `linear.chunked`, whose shapes it takes and returns. The gradient is that of `linear.chunked`, on XLA."""
    if query.shape[2] == 1:  # one token is products of a vector and a matrix: no chunk
        return chunked(query, key, value, log_decay, beta, initial_state, document, scale=scale, chunk_size=chunk_size)
    arrays = (query, key, value, log_decay, beta, initial_state, document)
    return _differentiable(scale, chunk_size, interpret, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(scale: float, chunk_size: int, interpret: bool, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(*arrays, scale=scale, chunk_size=chunk_size, interpret=interpret)


def _keep(scale: float, chunk_size: int, interpret: bool, *arrays: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    return _differentiable(scale, chunk_size, interpret, *arrays), arrays


def _backward(scale: float, chunk_size: int, interpret: bool, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    del interpret
    *floating, document = arrays

    def on_xla(*floating: Any) -> tuple[jax.Array, jax.Array]:
        query, key, value, log_decay, beta, initial_state = floating
        return chunked(query, key, value, log_decay, beta, initial_state, document, scale=scale, chunk_size=chunk_size)

    _, pull = jax.vjp(on_xla, *floating)
    none = None if document is None else np.zeros(document.shape, jax.dtypes.float0)
    return (*pull(cotangents), none)


_differentiable.defvjp(_keep, _backward)


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    initial_state: jax.Array | None,
    document: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    batch, key_heads, tokens, dim = query.shape
    heads, value_dim = value.shape[1], value.shape[3]
    size = chunk_tokens(tokens, chunk_size)
    chunks = -(-tokens // size)
    by_channel, out_dtype = log_decay.shape[3] > 1, query.dtype
    # Mosaic has no float16; in float32 its factors lose nothing.
    narrow = all(x.dtype == jnp.bfloat16 for x in (query, key, value))
    query, key, value = (x if narrow else x.astype(jnp.float32) for x in (query, key, value))
    decay = jnp.maximum(log_decay.astype(jnp.float32), np.float32(_FORGOTTEN))
    if document is not None:
        before = jnp.pad(document, ((0, 0), (1, 0)))[:, :-1]  # the first token's is that of the initial state, 0
        decay = jnp.where((document != before)[:, None, :, None], np.float32(_FORGOTTEN), decay)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, chunks * size - tokens), *[(0, 0)] * (x.ndim - 3)])

    rows = [] if by_channel else [decay[..., 0]]
    rows += [] if beta is None else [beta.astype(jnp.float32)]
    group = heads // key_heads
    sizes = Sizes(
        heads,
        group,
        dim,
        value_dim,
        size,
        np.dtype(query.dtype),
        by_channel,
        beta is not None,
        initial_state is not None,
    )
    step = heads_per_step(sizes)
    keys = max(step // group, 1)
    key_block = pl.BlockSpec((1, keys, size, dim), lambda b, h, c: (b, h if step >= group else h * step // group, c, 0))
    tokens_of = lambda width: pl.BlockSpec((1, step, size, width), lambda b, h, c: (b, h, c, 0))  # noqa: E731
    state_block = pl.BlockSpec((1, step, dim, value_dim), lambda b, h, c: (b, h, 0, 0))
    arrays = {"query": (padded(query), key_block), "key": (padded(key), key_block)}
    arrays["value"] = (padded(value), tokens_of(value_dim))
    if by_channel:
        arrays["decay"] = (padded(decay), tokens_of(dim))
    if rows:
        gates = jnp.stack([padded(x).reshape(batch, heads, chunks, size) for x in rows], 3)
        block = pl.BlockSpec((1, step, 1, len(rows), size), lambda b, h, c: (b, h, c, 0, 0))
        arrays["gates"] = (gates, block)
    if initial_state is not None:
        arrays["initial"] = (initial_state.astype(jnp.float32), state_block)
    names = (*arrays, "output", "state")
    how = _How(step, group, scale, by_channel, beta is not None)

    def kernel(*refs: Any) -> None:
        _kernel(dict(zip(names, refs, strict=True)), how)

    operands = [x for x, _ in arrays.values()]
    axes = varying(operands)
    operands = [vary(x, axes) for x in operands]
    products = size * (2 * dim + (2 if how.delta else 1) * value_dim) + 3 * dim * value_dim
    outputs, state = pl.pallas_call(
        kernel,
        out_shape=[
            varying_as(operands[0], (batch, heads, chunks * size, value_dim), query.dtype),
            varying_as(operands[0], (batch, heads, dim, value_dim), jnp.float32),
        ],
        grid=(batch, heads // step, chunks),
        in_specs=[spec for _, spec in arrays.values()],
        out_specs=[tokens_of(value_dim), state_block],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY)),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * heads * chunks * size * products,
            transcendentals=batch * heads * chunks * size * size,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in operands)
            + batch * heads * value_dim * (chunks * size * query.dtype.itemsize + dim * 4),
        ),
        interpret=interpret,
        name=NAME,
    )(*operands)
    return outputs[:, :, :tokens].astype(out_dtype), state


class _How(NamedTuple):
    """heads: of a step."""

    heads: int
    group: int
    scale: float
    by_channel: bool
    delta: bool


def _kernel(refs: dict[str, Any], how: _How) -> None:
    state = refs["state"]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = refs["initial"][...] if "initial" in refs else jnp.zeros(state.shape, jnp.float32)

    for head in range(how.heads):
        at = head // how.group if how.heads >= how.group else 0
        gates = [refs["gates"][0, head, 0, n : n + 1] for n in range(refs["gates"].shape[3])] if "gates" in refs else []
        decay = refs["decay"][0, head] if how.by_channel else gates[0]
        beta = gates[-1] if how.delta else None
        outputs, after = _chunk(
            refs["query"][0, at], refs["key"][0, at], refs["value"][0, head], decay, beta, state[0, head], how
        )
        refs["output"][0, head] = outputs.astype(refs["output"].dtype)
        state[0, head] = after


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype: Any = jnp.float32) -> jax.Array:
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


def _sums(chosen: jax.Array, x: jax.Array) -> jax.Array:
    """chosen @ x, of zeros and ones and float32, without loss: three products of bfloat16."""
    ones = chosen.astype(jnp.float32)
    high, middle, low = (_dot(ones, part, 1, 0, jnp.bfloat16) for part in _parts(x, 3))
    return low + middle + high


def _wide(a: jax.Array, b: jax.Array, dtype: Any, a_axis: int = 1) -> jax.Array:
    """A product of float32: without loss if dtype is that, else with 16 bits of each factor, twice what bfloat16 has."""
    if dtype != jnp.bfloat16:
        return _dot(a, b, a_axis, 0)
    (high, low), (other, rest) = _parts(a, 2), _parts(b, 2)
    small = _dot(high, rest, a_axis, 0, dtype) + _dot(low, other, a_axis, 0, dtype)
    return small + _dot(high, other, a_axis, 0, dtype)


class _Square(NamedTuple):
    """The places of a square matrix: of a token's row, and of an earlier or later one's column."""

    row: jax.Array
    column: jax.Array

    def below(self, half: int) -> jax.Array:
        """Whether a row is of a second half, and its column of the first half of the same block of two halves."""
        shift = half.bit_length() - 1
        row, column = self.row >> shift, self.column >> shift
        return (row == column + 1) & (row & 1 == 1)

    def to_middle(self, half: int) -> jax.Array:
        """Whether a column's log decay is between a row and the middle of its block: in a second half those up to the row, in a
        first half those after it."""
        shift = half.bit_length() - 1
        row, column = self.row >> shift, self.column >> shift
        second = row & 1 == 1
        between = (second & (self.column <= self.row)) | (~second & (self.column > self.row))
        return (row == column) & between


def _chunk(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
    how: _How,
) -> tuple[jax.Array, jax.Array]:
    """(outputs, state after it) of a head. decay: a row [1, tokens], or [tokens, dim]; beta: a row."""
    size, dtype = query.shape[0], query.dtype
    square = _Square(*(lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1)))
    both = jnp.concatenate([key, query], 0)
    decayed = _by_channel if how.by_channel else _by_head
    products, started, ended, kept = decayed(both, key, decay, square)
    wide = both.astype(jnp.float32) * jnp.concatenate([started, started], 0)
    read = _dot(wide, state, 1, 0, dtype)
    update, product = value.astype(jnp.float32), functools.partial(_dot, b_axis=0, dtype=dtype)
    if beta is not None:
        # Updates are differences, which may cancel in the sums over tokens: rounded to bfloat16 they wouldn't.
        product = functools.partial(_wide, dtype=dtype)
        strength = _as_column(beta, square)
        inverse = _unit_inverse(jnp.where(square.column < square.row, strength * products[:size], 0.0), square, dtype)
        update = product(inverse, strength * (update - read[:size]), a_axis=1)
    seen = jnp.where(square.column <= square.row, products[size:], 0.0)
    outputs = np.float32(how.scale) * (read[size:] + product(seen, update, a_axis=1))
    return outputs, kept * state + product(key.astype(jnp.float32) * ended, update, a_axis=0)


def _as_column(row: jax.Array, square: _Square) -> jax.Array:
    """[1, tokens] -> [tokens, 1]."""
    return jnp.sum(jnp.where(square.row == square.column, row, 0.0), 1, keepdims=True)


def _by_head(
    both: jax.Array, key: jax.Array, decay: jax.Array, square: _Square
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(products of the rows and earlier keys with the decay between them, the decays of rows from the start and to the end, that
    of the chunk). Each log decay is a sum over the tokens between."""
    row, column = square
    until = jnp.where(column <= row, decay, 0.0)
    later = (row > column).astype(jnp.float32)
    high, middle, low = (_dot(part, later, 1, 0, jnp.bfloat16) for part in _parts(until, 3))
    ratio = jnp.exp(low + middle + high)
    started = jnp.exp(jnp.sum(until, 1, keepdims=True))
    ended = jnp.exp(jnp.sum(jnp.where(column > row, decay, 0.0), 1, keepdims=True))
    kept = jnp.exp(jnp.sum(decay, 1, keepdims=True))
    return _dot(both, key, 1, 1, both.dtype) * jnp.concatenate([ratio, ratio], 0), started, ended, kept


def _by_channel(
    both: jax.Array, key: jax.Array, decay: jax.Array, square: _Square
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As _by_head, of decays [tokens, dim]: by halves, with the log decays from the middle of each block of tokens."""
    row, column = square
    size = key.shape[0]
    rows, columns = both.astype(jnp.float32), key.astype(jnp.float32)
    own = jnp.sum(rows * jnp.concatenate([columns, columns], 0), 1, keepdims=True)
    products = jnp.where(jnp.concatenate([row == column] * 2, 0), own, 0.0)
    half = 1
    while half < size:
        kept = jnp.exp(_sums(square.to_middle(half), decay))
        level = _dot(rows * jnp.concatenate([kept, kept], 0), columns * kept, 1, 1, both.dtype)
        products = jnp.where(jnp.concatenate([square.below(half)] * 2, 0), level, products)
        half *= 2
    started = jnp.exp(_sums(column <= row, decay))
    ended = jnp.exp(_sums(column > row, decay))
    return products, started, ended, _as_rows(jnp.exp(jnp.sum(decay, 0, keepdims=True)))


def _as_rows(channels: jax.Array) -> jax.Array:
    """[1, dim] -> [dim, 1]."""
    dim = channels.shape[1]
    row, column = (lax.broadcasted_iota(jnp.int32, (dim, dim), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(row == column, channels, 0.0), 1, keepdims=True)


def _unit_inverse(strict: jax.Array, square: _Square, dtype: Any) -> jax.Array:
    """(I + strict)^-1, for all blocks of a size at once: those of a few rows by forward substitution, then by halves as
    unit_triangular.py. With A^-1 and D^-1 on the diagonal of X and B below them, the rows of D^-1 become those of
    [-D^-1 B A^-1, D^-1]."""
    size = strict.shape[0]
    found = (square.row == square.column).astype(jnp.float32)
    first = square.row & -_ROWS  # of the block
    for n in range(_ROWS - 1):
        factor = jnp.sum(jnp.where(square.column == first + n, strict, 0.0), 1, keepdims=True)  # 0 up to row n
        row = found.reshape(size // _ROWS, _ROWS, size)[:, n : n + 1]
        found = found - factor * jnp.broadcast_to(row, (size // _ROWS, _ROWS, size)).reshape(size, size)
    half = _ROWS
    while half < size:
        blocks = found.reshape(size // (2 * half), 2, half, size)
        second = blocks[:, 1].reshape(size // 2, size)
        below = jnp.where(square.below(half), strict, 0.0)
        change = _wide(_wide(second, below, dtype), found, dtype)
        second = (second - change).reshape(size // (2 * half), 1, half, size)
        found = jnp.concatenate([blocks[:, :1], second], 1).reshape(size, size)
        half *= 2
    return found
