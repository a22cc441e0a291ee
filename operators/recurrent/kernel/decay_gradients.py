"""The gradient of `decayed_products`, which are those of decays.py.

With a decay for each channel, the log decay between two tokens is a difference of sums, up to the later token and up to the
earlier one: so the gradient of these sums is what rows times their gradients are, less what columns times theirs are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .decays import from_start, from_start_gradient, log_ratios, sums_of, to_end

__all__ = ["decayed_gradients"]

_BLOCK = 8  # tokens, the levels of whose halves are worked on at once


def decayed_gradients(
    rows: tuple[jax.Array, ...],
    columns: jax.Array,
    log_decay: jax.Array,
    made: list[jax.Array],
    d_made: list[jax.Array],
    precision: lax.Precision,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The gradients of rows, columns [n, tokens, dim] and log_decay [n, tokens, dim or 1]. made, d_made [n, tokens, tokens]: what
    decayed_products returns, and its gradient, 0 above the diagonal."""
    if log_decay.shape[2] > 1:
        return _by_channel_gradients(rows, columns, log_decay, d_made, precision)
    size, exactly = columns.shape[1], functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    ratios = jnp.exp(log_ratios(log_decay[..., 0]))
    plain = jnp.concatenate([x * ratios for x in d_made], 1)
    product = functools.partial(jnp.einsum, precision=precision)
    d_rows, d_columns = (
        product("nij,njd->nid", plain, columns),
        product("nij,nid->njd", plain, jnp.concatenate(rows, 1)),
    )
    both = _sum(x * d for x, d in zip(made, d_made, strict=True))
    # Of a row's log decay at a token between it and a column: what all columns before the token have.
    before = exactly("nij,tj->nit", both, np.tri(size, k=-1, dtype=np.float32))
    d_decay = exactly("nit,ic->ntc", before * np.tri(size, dtype=np.float32)[None], np.ones((size, 1), np.float32))
    return jnp.split(d_rows, len(rows), 1), d_columns, d_decay


def _by_channel_gradients(
    rows: tuple[jax.Array, ...],
    columns: jax.Array,
    log_decay: jax.Array,
    d_made: list[jax.Array],
    precision: lax.Precision,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    d_rows, d_columns = _between(rows, columns, log_decay, d_made, precision)
    d_sums = _sum(x * d for x, d in zip(rows, d_rows, strict=True)) - columns * d_columns
    own = [jnp.sum(x * np.eye(x.shape[1], dtype=np.float32)[None], 2, keepdims=True) for x in d_made]
    d_rows = [d + x * columns for d, x in zip(d_rows, own, strict=True)]
    d_columns = d_columns + _sum(x * row for x, row in zip(own, rows, strict=True))
    return d_rows, d_columns, from_start_gradient(d_sums)


def _between(
    rows: tuple[jax.Array, ...],
    columns: jax.Array,
    log_decay: jax.Array,
    d_made: list[jax.Array],
    precision: lax.Precision,
) -> tuple[list[jax.Array], jax.Array]:
    """The gradients of rows and columns from products of two different tokens."""
    count, size, dim = columns.shape
    if size <= _BLOCK:
        return _in_blocks(rows, columns, log_decay, d_made, precision)
    half = size // 2

    def pairs(x: jax.Array) -> jax.Array:
        return x.reshape(2 * count, half, dim)

    def on_diagonal(x: jax.Array) -> jax.Array:
        return jnp.stack([x[:, :half, :half], x[:, half:, half:]], 1).reshape(2 * count, half, half)

    inner = _between(
        tuple(map(pairs, rows)), pairs(columns), pairs(log_decay), [on_diagonal(x) for x in d_made], precision
    )
    started = jnp.exp(from_start(log_decay[:, half:]))
    ended = jnp.exp(to_end(log_decay[:, :half]))
    below = jnp.concatenate([x[:, half:, :half] for x in d_made], 1)
    near = jnp.concatenate([x[:, half:] * started for x in rows], 1)
    d_near = jnp.einsum("nij,njd->nid", below, columns[:, :half] * ended, precision=precision)
    d_columns_near = jnp.einsum("nij,nid->njd", below, near, precision=precision)

    def added(x: jax.Array, first: jax.Array | None, second: jax.Array | None) -> jax.Array:
        """[2n, half, dim] and what the first or second halves have besides."""
        one, other = jnp.split(x.reshape(count, size, dim), 2, 1)
        one = one if first is None else one + first
        return jnp.concatenate([one, other if second is None else other + second], 1)

    d_rows = [added(x, None, d * started) for x, d in zip(inner[0], jnp.split(d_near, len(rows), 1), strict=True)]
    return d_rows, added(inner[1], d_columns_near * ended, None)


def _levels(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a block of tokens that is halved until one is left: (for each level, smallest first, which log decays [levels * size,
    size] are between a token and the middle of its part; which pairs [levels, size, size] are of a level)."""
    token, other = np.arange(size)[:, None], np.arange(size)[None]
    sums, pairs, half = [], [], 1
    while half < size:
        same, second = token // (2 * half) == other // (2 * half), token // half % 2 == 1
        until = second & (other // half % 2 == 1) & (other <= token)
        after = ~second & (other // half % 2 == 0) & (other > token)
        sums.append(same & (until | after))
        pairs.append(same & second & (other // half % 2 == 0))
        half *= 2
    return np.concatenate(sums).astype(np.float32), np.stack(pairs).astype(np.float32)


def _in_blocks(
    rows: tuple[jax.Array, ...],
    columns: jax.Array,
    log_decay: jax.Array,
    d_made: list[jax.Array],
    precision: lax.Precision,
) -> tuple[list[jax.Array], jax.Array]:
    """All levels of a block at once."""
    count, size, dim = columns.shape
    if size == 1:
        return [jnp.zeros_like(x) for x in rows], jnp.zeros_like(columns)
    sums, pairs = _levels(size)
    near = jnp.exp(sums_of(log_decay, sums)).reshape(count, -1, size, dim)
    columns_near, d_rows, d_columns = columns[:, None] * near, [], []
    for x, d in zip(rows, d_made, strict=True):
        level = d[:, None] * pairs[None]
        # Turned before it is masked: XLA for CPUs takes longer for a product with a turned factor.
        turned = jnp.swapaxes(d, 1, 2)[:, None] * np.swapaxes(pairs, 1, 2)[None]
        d_near = jnp.einsum("nlij,nljd->nlid", level, columns_near, precision=precision)
        d_rows.append(jnp.sum(d_near * near, 1))
        d_columns.append(jnp.einsum("nlji,nlid->nljd", turned, x[:, None] * near, precision=precision))
    return d_rows, jnp.sum(_sum(d_columns) * near, 1)


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)
