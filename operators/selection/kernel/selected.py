"""Attention of each query to the keys that were selected for it, with its gradient, in blocks of queries.

Keys are gathered for each query, or a block of queries goes over the tiles from which any of them selected; what takes less work
by count runs. The weights are recomputed from the log-sum-exps in the backward pass, as in Dao et al., "FlashAttention" (2022).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ....errors import InputError, is_whole, shown
from ...kernels.derivatives import once, reverse_only
from ...kernels.lse import divisor_and_lse, subtracted
from ...kernels.precision import exact
from ...kernels.varying import alike, vary, varying
from .checks import check_attention, check_positions
from .key_tiles import GatheredKeys, KeyTile, KeyTiles, SelectedTiles, fold_blocks, heads_first, heads_last
from .row_blocks import block_of, long_enough, put_block
from .selected_sizes import Path, Sizes, choose

__all__ = ["selected_attention"]

_NAME = "selected attention"


def selected_attention(
    query: Float[Array, "batch q_len heads dim"],
    key: Float[Array, "batch kv_len kv_heads dim"],
    value: Float[Array, "batch kv_len kv_heads value_dim"] | None,
    positions: Int[Array, "batch q_len k"],
    *,
    softmax_scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    value_dim: int | None = None,
    path: Path | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> tuple[Float[Array, "batch q_len heads value_dim"], Float[Array, "batch heads q_len"]]:
    """(output in the query's dtype, float32 log-sum-exps) of attention to the keys at `positions`, softmax in float32.

    positions: distinct in each row; what isn't a key's position, such as -1, is unused. A query without keys has output 0, an lse
    of -inf or its sink, and no gradient. value=None: the first value_dim columns of the keys are the values, as in latent
    attention. sinks: a logit of each head without a value. The selection is a constant.

    path: 'gather' copies the keys of each query, 'tiles' masks tiles of keys; None takes what is less work. block_q, block_kv:
    queries and keys that are worked on together. There is a first derivative, in reverse mode.

    Errors: InputError for shapes that don't fit, InputTypeError for dtypes.
    """
    _check(query, key, value, positions, sinks, value_dim)
    if soft_cap is not None and not soft_cap > 0:
        raise InputError(f"soft_cap is {shown(soft_cap)}; wanted a number > 0, or None.")
    batch, q_len, heads, _ = query.shape
    dim = key.shape[3] if value is not None else value_dim
    value_size = value.shape[3] if value is not None else dim
    assert value_size is not None
    if 0 in (batch, q_len, heads, key.shape[1], positions.shape[2]):
        positions = jnp.full((batch, q_len, 1), -1, jnp.int32)
        if 0 in (batch, q_len, heads):
            return jnp.zeros((*query.shape[:3], value_size), query.dtype), jnp.zeros((batch, heads, q_len), jnp.float32)
        if key.shape[1] == 0:
            key = jnp.zeros((batch, 1, *key.shape[2:]), key.dtype)
            value = None if value is None else jnp.zeros((batch, 1, *value.shape[2:]), value.dtype)
    copied = key.shape[3] + (0 if value is None else value_size)
    sizes = choose(
        q_len,
        key.shape[1],
        positions.shape[2],
        group=heads // key.shape[2],
        dim=copied,
        path=path,
        block_q=block_q,
        block_kv=block_kv,
    )
    static = _Static(softmax_scale, soft_cap, value_size, sizes)
    arrays, positions = alike((_Operands(query, key, value, sinks), positions.astype(jnp.int32)))
    return _attend(static, reverse_only(arrays, _NAME), lax.stop_gradient(positions))


class _Operands(NamedTuple):
    query: Array
    key: Array
    value: Array | None
    sinks: Array | None


@dataclass(frozen=True)
class _Static:
    """Everything known at trace time."""

    scale: float
    soft_cap: float | None
    value_dim: int
    sizes: Sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, arrays: _Operands, positions: Array) -> tuple[Array, Array]:
    return _forward(static, arrays, positions)[0]


def _forward(static: _Static, arrays: _Operands, positions: Array) -> tuple[tuple[Array, Array], Any]:
    arrays = once(arrays, _NAME)
    work = _Work(static, arrays, positions)
    shape = work.query.shape[:-1]
    results = work.zeros((*shape, static.value_dim), arrays.query.dtype), work.zeros(shape, jnp.float32)
    output, lse = fold_blocks(shape[0], shape[1], work.block_q, work.attend, results)
    output, lse = work.as_given(output), work.as_given(lse[..., None])[..., 0]
    return (output, lse.swapaxes(1, 2)), (arrays, positions, output, lse)


def _backward(static: _Static, saved: Any, cotangents: tuple[Array, Array]) -> tuple[_Operands, Any]:
    arrays, positions, output, lse = saved
    d_output, d_lse = once(cotangents, _NAME)
    work = _Work(static, arrays, positions)
    d_output = d_output.astype(jnp.float32)
    delta = (d_output * output.astype(jnp.float32)).sum(-1) - d_lse.swapaxes(1, 2)
    rows = work.by_kv_head(d_output), work.by_kv_head(delta[..., None]), work.by_kv_head(lse[..., None])
    d_value = None if work.value is None else work.zeros(work.value.shape, jnp.float32)
    d_query, d_key = work.zeros(work.query.shape, jnp.float32), work.zeros(work.key.shape, jnp.float32)
    gradients = _Operands(d_query, d_key, d_value, None)
    step = functools.partial(work.differentiate, rows=rows)
    gradients = fold_blocks(work.query.shape[0], work.query.shape[1], work.block_q, step, gradients)
    d_sinks = None
    if arrays.sinks is not None:
        share = jnp.exp(arrays.sinks.astype(jnp.float32)[None, None] - lse)
        share = jnp.where(share == 0, 0, share * delta)
        d_sinks = -share.sum((0, 1)).astype(arrays.sinks.dtype)
    d_key = work.tiles.restored(gradients.key, work.kv_heads).astype(arrays.key.dtype)
    if gradients.value is not None:
        d_value = work.tiles.restored(gradients.value, work.kv_heads).astype(arrays.value.dtype)
    d_query = work.as_given(gradients.query).astype(arrays.query.dtype)
    return _Operands(d_query, d_key, d_value, d_sinks), np.zeros(positions.shape, jax.dtypes.float0)


_attend.defvjp(_forward, _backward)


class _Work:
    """The arrays by kv head, [batch * kv_heads, length, ...], and both passes over a block of queries."""

    def __init__(self, static: _Static, arrays: _Operands, positions: Array) -> None:
        self.static, self.sinks = static, arrays.sinks
        self.batch, self.q_len, self.heads, _ = arrays.query.shape
        self.kv_len, self.kv_heads = arrays.key.shape[1:3]
        self.axes = varying((arrays, positions))
        sizes = static.sizes
        self.block_q = sizes.block_q
        self.tiles: KeyTiles
        if sizes.path == "gather":
            self.tiles = GatheredKeys(positions, self.kv_len, sizes.block_q)
        else:
            self.tiles = SelectedTiles(positions, self.kv_len, sizes.block_q, sizes.block_kv)
        self.query = self.by_kv_head(arrays.query)
        self.key = self.tiles.prepared(arrays.key)
        self.value = None if arrays.value is None else self.tiles.prepared(arrays.value)
        self.dtype = arrays.query.dtype

    def zeros(self, shape: tuple[int, ...], dtype: Any, value: float = 0) -> Array:
        """A constant as a loop's first value."""
        return vary(jnp.full(shape, value, dtype), self.axes)

    def by_kv_head(self, x: Array) -> Array:
        """[batch, q_len, heads, n] as [batch * kv_heads, q_len, group, n]."""
        return long_enough(heads_first(x.reshape(*x.shape[:2], self.kv_heads, -1, x.shape[3])), self.block_q)

    def as_given(self, x: Array) -> Array:
        """The inverse."""
        x = heads_last(x[:, : self.q_len], self.kv_heads)
        return x.reshape(self.batch, self.q_len, self.heads, x.shape[-1])

    def logits(self, query: Array, tile: KeyTile, row: Any) -> tuple[Array, Array, Array]:
        """(logits [block_q, group, keys], -inf where not visible; keys; values)."""
        key = tile.take(self.key, row).astype(self.dtype)
        value = key[..., : self.static.value_dim]
        if self.value is not None:
            value = tile.take(self.value, row).astype(self.dtype)
        x = self.product(f"qgd,{tile.rows}nd->qgn", query, key) * self.static.scale
        if self.static.soft_cap is not None:
            x = self.static.soft_cap * jnp.tanh(x / self.static.soft_cap)
        return jnp.where(jnp.broadcast_to(tile.visible[:, None], x.shape), x, -jnp.inf), key, value

    def product(self, subscripts: str, a: Array, b: Array) -> Array:
        """A product in the query's dtype, summed in float32."""
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        return jnp.einsum(subscripts, a, b, precision=exact(self.dtype), preferred_element_type=jnp.float32)

    def attend(self, row: Any, q_block: Any, results: tuple[Array, Array]) -> tuple[Array, Array]:
        """Write output and lse of a block of queries."""
        query = block_of(self.query, row, q_block, self.block_q)
        shape = query.shape[:2]

        def visit(tile: KeyTile, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            greatest, total, summed = carry
            x, _, value = self.logits(query, tile, row)
            new = jnp.maximum(greatest, x.max(-1))
            shift = subtracted(new)
            weights, before = jnp.exp(x - shift[..., None]), jnp.exp(greatest - shift)
            part = self.product(f"qgn,{tile.rows}nd->qgd", weights, value)
            return new, total * before + weights.sum(-1), summed * before[..., None] + part

        first = self.zeros(shape, jnp.float32, -jnp.inf), self.zeros(shape, jnp.float32)
        first_sum = self.zeros((*shape, self.static.value_dim), jnp.float32)
        number = row // np.int32(self.kv_heads)
        greatest, total, summed = self.tiles.fold(number, q_block, visit, (*first, first_sum))
        shift = subtracted(greatest)
        if self.sinks is not None:
            sinks = self.sinks.astype(jnp.float32).reshape(self.kv_heads, -1)
            sink = lax.dynamic_index_in_dim(sinks, row % np.int32(self.kv_heads), keepdims=True)
            shift = subtracted(jnp.maximum(greatest, sink))
            rescale = jnp.exp(greatest - shift)
            total, summed = total * rescale + jnp.exp(sink - shift), summed * rescale[..., None]
        divided, lse = divisor_and_lse(total, shift)
        output = (summed / divided[..., None]).astype(self.dtype)
        return put_block(results[0], output, row, q_block), put_block(results[1], lse, row, q_block)

    def differentiate(
        self, row: Any, q_block: Any, gradients: _Operands, rows: tuple[Array, Array, Array]
    ) -> _Operands:
        """Add what a block of queries gives to the gradients."""
        query = block_of(self.query, row, q_block, self.block_q)
        d_output, delta, lse = (block_of(x, row, q_block, self.block_q) for x in rows)
        lse = jnp.where(lse == -jnp.inf, jnp.zeros_like(lse), lse)

        def visit(tile: KeyTile, carry: tuple[Array, Array, Array | None]) -> tuple[Array, Array, Array | None]:
            d_query, d_key, d_value = carry
            x, key, value = self.logits(query, tile, row)
            weights = jnp.exp(x - lse)
            gradient = weights * (self.product(f"qgd,{tile.rows}nd->qgn", d_output, value) - delta)
            if self.static.soft_cap is not None:
                gradient = gradient * (1 - (x / self.static.soft_cap) ** 2)
            gradient = jnp.where(weights == 0, 0, gradient) * self.static.scale
            d_query = d_query + self.product(f"qgn,{tile.rows}nd->qgd", gradient, key)
            of_key = self.product(f"qgn,qgd->{tile.rows}nd", gradient, query)
            of_value = self.product(f"qgn,qgd->{tile.rows}nd", weights, d_output)
            if d_value is not None:
                return d_query, tile.add(d_key, of_key, row), tile.add(d_value, of_value, row)
            of_key = of_key.at[..., : self.static.value_dim].add(of_value)
            return d_query, tile.add(d_key, of_key, row), None

        carry = self.zeros(query.shape, jnp.float32), gradients.key, gradients.value
        number = row // np.int32(self.kv_heads)
        d_query, d_key, d_value = self.tiles.fold(number, q_block, visit, carry)
        return _Operands(put_block(gradients.query, d_query, row, q_block), d_key, d_value, None)


def _check(
    query: Array, key: Array, value: Array | None, positions: Array, sinks: Array | None, value_dim: int | None
) -> None:
    check_attention(query, key, value=value, sinks=sinks)
    batch, q_len, heads, dim = query.shape
    if value is not None and (value.ndim != 4 or value.shape[:3] != key.shape[:3]):
        raise InputError(f"value has shape {value.shape}; wanted {[*key.shape[:3], 'value_dim']}, as the key.")
    if (value is None) != (value_dim is not None):
        raise InputError(f"value_dim is {shown(value_dim)}; wanted it if value is None, and only then.")
    if value_dim is not None and not is_whole(value_dim, 1, dim):
        raise InputError(f"value_dim is {shown(value_dim)}; wanted an int from 1 to {dim}, the key's columns.")
    check_positions(positions, batch, q_len)
    if sinks is not None and sinks.shape != (heads,):
        raise InputError(f"sinks has shape {sinks.shape}; wanted [{heads}], one for each query head.")
