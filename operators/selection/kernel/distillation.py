"""The loss that trains an indexer: how far its scores are from what the main attention attends to.

The gradient recomputes scores and weights in blocks of queries. Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), equations 3 and 4.
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

from ....errors import InputError
from ...kernels.derivatives import once, reverse_only
from ...kernels.lse import log_of_sum, subtracted
from ...kernels.precision import exact
from ...kernels.primitives import numbers
from ...kernels.varying import vary, varying
from .checks import check_attention, check_lengths, check_positions
from .index_scores import check_index, head_scores, index_scores, product_dtype
from .key_tiles import GatheredKeys, KeyTile, KeyTiles, SelectedTiles, VisibleTiles, fold_blocks
from .row_blocks import block_of, long_enough, put_block
from .selected_sizes import Path, Sizes, choose
from .visibility import Window, local_mask

__all__ = ["indexer_loss"]

_NAME = "indexer_loss"


def indexer_loss(
    index_query: Float[Array, "batch q_len index_heads index_dim"],
    index_key: Float[Array, "batch kv_len index_dim"],
    weights: Float[Array, "batch q_len index_heads"],
    query: Float[Array, "batch q_len heads dim"],
    key: Float[Array, "batch kv_len kv_heads dim"],
    *,
    softmax_scale: float,
    index_scale: float,
    soft_cap: float | None = None,
    lse: Float[Array, "batch heads q_len"] | None = None,
    positions: Int[Array, "batch q_len k"] | None = None,
    causal: bool = True,
    sliding_window: Window | None = None,
    query_offset: int | Int[Array, " batch"] = 0,
    q_positions: Int[Array, "batch q_len"] | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
    q_segment_ids: Int[Array, "batch q_len"] | None = None,
    kv_segment_ids: Int[Array, "batch kv_len"] | None = None,
    path: Path | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Float[Array, ""]:
    """The mean of KL(p || softmax(index scores)) over the queries that have keys, float32, in nats; 0 if none has.

    p: the main attention's weights, averaged over its heads, divided by their sum. softmax and sum are over the query's keys:
    those at `positions`, all of which are visible, or all that `local_mask` shows.
    lse: that of the main attention, if it had others too (all visible ones, or sinks); None is that of the same keys.

    Gradients go to index_query, index_key and weights; p is a constant. There is a first derivative, in reverse mode.
    path, block_q, block_kv: see `selected_attention`. Errors: InputError for shapes, InputTypeError for dtypes.
    """
    check_index(index_query, index_key, weights)
    check_attention(query, key, index_query=index_query, index_key=index_key, lse=lse)
    batch, q_len, heads, dim = query.shape
    check_lengths(query, key, index_query, index_key, lse)
    seen: dict[str, Any] = {"query_offset": query_offset, "q_positions": q_positions, "kv_lengths": kv_lengths}
    seen |= {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids}
    seen = {name: x for name, x in seen.items() if x is not None and not (isinstance(x, int) and x == 0)}
    if positions is not None:
        check_positions(positions, batch, q_len)
        if seen or sliding_window is not None:
            given = ", ".join(["sliding_window"] * (sliding_window is not None) + sorted(seen))
            raise InputError(
                f"got positions and {given}; wanted one of them: a selection has the keys that are visible."
            )
    kv_heads = key.shape[2]
    if 0 in (batch, q_len, heads, key.shape[1]) or (positions is not None and positions.shape[2] == 0):
        return jnp.zeros((), jnp.float32)
    sizes = choose(
        q_len,
        key.shape[1],
        key.shape[1] if positions is None else positions.shape[2],
        group=heads // kv_heads,
        dim=dim,
        together=kv_heads,
        path="tiles" if positions is None else path,
        block_q=block_q,
        block_kv=block_kv,
    )
    offset = seen.pop("query_offset", 0) if isinstance(query_offset, int) else 0
    static = _Static(softmax_scale, index_scale, soft_cap, sizes, causal, sliding_window, offset)
    constant = _Constant(query, key, lse, positions, seen)
    learned = reverse_only(_Learned(index_query, index_key, weights), _NAME)
    return _loss(static, learned, lax.stop_gradient(constant))


class _Learned(NamedTuple):
    query: Array
    key: Array
    weights: Array


class _Constant(NamedTuple):
    query: Array
    key: Array
    lse: Array | None
    positions: Array | None
    seen: dict[str, Array]


@dataclass(frozen=True)
class _Static:
    """Everything known at trace time."""

    softmax_scale: float
    index_scale: float
    soft_cap: float | None
    sizes: Sizes
    causal: bool
    sliding_window: Window | None
    query_offset: int


class _Sums(NamedTuple):
    """Of each query: log-sum-exps of the main heads [batch, q_len, heads] and of the index scores, the sum of p, the loss."""

    lse: Array
    index_lse: Array
    total: Array
    loss: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: _Static, learned: _Learned, constant: _Constant) -> Array:
    return _forward(static, learned, constant)[0]


def _forward(static: _Static, learned: _Learned, constant: _Constant) -> tuple[Array, Any]:
    learned = once(learned, _NAME)
    work = _Work(static, learned, constant)
    shape = work.query.shape[:2]
    first = _Sums(work.zeros((*shape, work.query.shape[2])), *(work.zeros(shape) for _ in range(3)))
    sums = fold_blocks(shape[0], work.q_len, work.block_q, work.measure, first)
    sums = _Sums(*(x[:, : work.q_len] for x in sums))
    count = jnp.maximum((sums.total > 0).sum(dtype=jnp.float32), 1)
    return sums.loss.sum() / count, (learned, constant, sums, count)


def _backward(static: _Static, saved: Any, cotangent: Array) -> tuple[_Learned, None]:
    learned, constant, sums, count = saved
    cotangent = once(cotangent, _NAME)
    work = _Work(static, learned, constant)
    gradients = _Learned(*(work.zeros(x.shape) for x in (work.index_query, work.index_key, work.weights)))
    sums = _Sums(*(long_enough(x, work.block_q) for x in sums))
    step = functools.partial(work.differentiate, sums=sums, unit=cotangent / count)
    gradients = fold_blocks(work.query.shape[0], work.q_len, work.block_q, step, gradients)
    key = work.tiles.restored(gradients.key, 1)[:, :, 0]
    found = gradients.query[:, : work.q_len], key, gradients.weights[:, : work.q_len]
    return _Learned(*(x.astype(like.dtype) for x, like in zip(found, learned, strict=True))), None


_loss.defvjp(_forward, _backward)


class _Work:
    """The arrays in blocks, and both passes over a block of queries."""

    def __init__(self, static: _Static, learned: _Learned, constant: _Constant) -> None:
        self.static = static
        self.batch, self.q_len = constant.query.shape[:2]
        self.kv_len, self.kv_heads = constant.key.shape[1:3]
        self.axes = varying((learned, constant))
        self.block_q = static.sizes.block_q
        self.tiles = self._tiles(constant)
        rows = (learned.query, learned.weights, constant.query)
        self.index_query, self.weights, self.query = (long_enough(x, self.block_q) for x in rows)
        self.lse = None if constant.lse is None else long_enough(constant.lse.swapaxes(1, 2), self.block_q)
        self.index_key = self.tiles.prepared(learned.key[:, :, None])
        self.key = self.tiles.prepared(constant.key)
        self.dtype = product_dtype(constant.query.dtype, constant.key.dtype)

    def _tiles(self, constant: _Constant) -> KeyTiles:
        static, sizes = self.static, self.static.sizes
        if constant.positions is not None:
            if sizes.path == "gather":
                return GatheredKeys(constant.positions, self.kv_len, sizes.block_q)
            return SelectedTiles(constant.positions, self.kv_len, sizes.block_q, sizes.block_kv)
        seen: dict[str, Any] = {"query_offset": static.query_offset, **constant.seen}
        seen |= {"causal": static.causal, "sliding_window": static.sliding_window}
        mask = local_mask(self.batch, self.q_len, self.kv_len, **seen)
        return VisibleTiles(mask, sizes.block_q, sizes.block_kv)

    def zeros(self, shape: tuple[int, ...], value: float = 0) -> Array:
        """A constant as a loop's first value."""
        return vary(jnp.full(shape, value, jnp.float32), self.axes)

    def index(self, query: Array, weights: Array, tile: KeyTile, row: Any) -> tuple[Array, Array, Array]:
        """(index scores [block_q, keys], -inf where not visible; those of the heads [block_q, heads, keys]; index keys)."""
        key = tile.take(self.index_key, row)
        per_head = head_scores(query, key, self.static.index_scale)
        return jnp.where(tile.visible, index_scores(per_head, weights), -jnp.inf), per_head, key

    def logits(self, query: Array, tile: KeyTile, row: Any) -> Array:
        """Those of the main attention, [block_q, keys, heads], -inf where not visible."""

        def of_head(head: Array) -> Array:
            key = tile.take(self.key, row * np.int32(self.kv_heads) + head).astype(self.dtype)
            part = lax.dynamic_index_in_dim(grouped, head, 1, keepdims=False)
            subscripts = f"qgd,{tile.rows}nd->qng"
            return jnp.einsum(subscripts, part, key, precision=exact(self.dtype), preferred_element_type=jnp.float32)

        grouped = query.astype(self.dtype).reshape(query.shape[0], self.kv_heads, -1, query.shape[2])
        x = lax.map(of_head, numbers((self.kv_heads,), 0)) if self.kv_heads > 1 else of_head(jnp.int32(0))[None]
        x = jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1) * self.static.softmax_scale
        if self.static.soft_cap is not None:
            x = self.static.soft_cap * jnp.tanh(x / self.static.soft_cap)
        return jnp.where(jnp.broadcast_to(tile.visible[..., None], x.shape), x, -jnp.inf)

    def attended(self, query: Array, tile: KeyTile, row: Any, lse: Array) -> Array:
        """p before it is divided by its sum, [block_q, keys]."""
        return jnp.exp(self.logits(query, tile, row) - jnp.where(lse == -jnp.inf, 0, lse)[:, None]).mean(-1)

    def measure(self, row: Any, q_block: Any, sums: _Sums) -> _Sums:
        """Write the sums of a block of queries."""
        arrays = self.index_query, self.weights, self.query
        index_query, weights, query = (block_of(x, row, q_block, self.block_q) for x in arrays)
        known = None if self.lse is None else block_of(self.lse, row, q_block, self.block_q).astype(jnp.float32)

        def normalise(tile: KeyTile, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            index, _, _ = self.index(index_query, weights, tile, row)
            found = _added(carry[0], carry[1], index)
            return (
                (*found, *carry[2:])
                if known is not None
                else (*found, *_added(carry[2], carry[3], self.logits(query, tile, row)))
            )

        size, heads = self.block_q, self.query.shape[2]
        first = self.zeros((size,), -np.inf), self.zeros((size,))
        first_heads = self.zeros((size, heads), -np.inf), self.zeros((size, heads))
        index_greatest, index_total, greatest, total = self.tiles.fold(row, q_block, normalise, (*first, *first_heads))
        index_lse = log_of_sum(index_total, subtracted(index_greatest))
        lse = log_of_sum(total, subtracted(greatest)) if known is None else known

        def compare(tile: KeyTile, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            p = self.attended(query, tile, row, lse)
            index, _, _ = self.index(index_query, weights, tile, row)
            some = p > 0
            term = jnp.where(some, p * (jnp.log(jnp.where(some, p, 1)) - jnp.where(some, index, 0)), 0)
            return carry[0] + p.sum(-1), carry[1] + term.sum(-1)

        p_total, term = self.tiles.fold(row, q_block, compare, first[1:] * 2)
        some = p_total > 0
        divided = jnp.where(some, p_total, 1)
        loss = jnp.where(some, term / divided - jnp.log(divided) + index_lse, 0)
        new = _Sums(lse, index_lse, p_total, loss)
        return _Sums(*(put_block(x, part, row, q_block) for x, part in zip(sums, new, strict=True)))

    def differentiate(self, row: Any, q_block: Any, gradients: _Learned, sums: _Sums, unit: Array) -> _Learned:
        """Add what a block of queries gives to the gradients. unit: the gradient of the loss of one query."""
        arrays = self.index_query, self.weights, self.query, *sums[:3]
        index_query, weights, query, lse, index_lse, total = (block_of(x, row, q_block, self.block_q) for x in arrays)
        some = total > 0
        dtype = product_dtype(index_query.dtype, self.index_key.dtype)
        index_lse = jnp.where(index_lse == -jnp.inf, 0, index_lse)

        def product(subscripts: str, a: Array, b: Array) -> Array:
            a, b = a.astype(dtype), b.astype(dtype)
            return jnp.einsum(subscripts, a, b, precision=exact(dtype), preferred_element_type=jnp.float32)

        def visit(tile: KeyTile, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_key, d_weights = carry
            index, per_head, key = self.index(index_query, weights, tile, row)
            p = self.attended(query, tile, row, lse) / jnp.where(some, total, 1)[:, None]
            estimate = jnp.exp(index - index_lse[:, None])
            d_score = jnp.where(tile.visible & some[:, None], (estimate - p) * unit, 0)[:, None]
            d_weights = d_weights + (jnp.where(d_score == 0, 0, d_score * jnp.maximum(per_head, 0))).sum(-1)
            d_head = (
                jnp.where(per_head > 0, d_score * weights.astype(jnp.float32)[..., None], 0) * self.static.index_scale
            )
            d_query = d_query + product(f"qhn,{tile.rows}nd->qhd", d_head, key)
            return d_query, tile.add(d_key, product(f"qhn,qhd->{tile.rows}nd", d_head, index_query), row), d_weights

        first = self.zeros(index_query.shape), gradients.key, self.zeros(weights.shape)
        d_query, d_key, d_weights = self.tiles.fold(row, q_block, visit, first)
        d_query = put_block(gradients.query, d_query, row, q_block)
        return _Learned(d_query, d_key, put_block(gradients.weights, d_weights, row, q_block))


def _added(greatest: Array, total: Array, x: Array) -> tuple[Array, Array]:
    """The greatest and the sum of exponentials with those of x [block_q, keys, ...]."""
    new = jnp.maximum(greatest, x.max(1))
    shift = subtracted(new)
    return new, total * jnp.exp(greatest - shift) + jnp.exp(x - shift[:, None]).sum(1)
