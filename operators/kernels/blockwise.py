"""Attention in blocks with an online softmax, forward and backward, on plain XLA.

For each group of kv heads: its K and V are copied together once, then each query block goes over the kv blocks that its
rows can see; first those that need a mask, then those that don't. The logits exist one tile at a time. Logits are held in
base 2 (times log2 e), as exp2 is the cheaper exponential.

The recurrence is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); the backward pass
that recomputes the weights from the lse is that of Dao et al., "FlashAttention" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..local_mask import Dropout, LocalMask
from .decode import Pieces, decode_forward
from .lean import cut, cut_along, dot, fold, loop, put, split_index, where
from .operands import Operands, Places, Traced, put_together
from .part import LSE_NAME, OUTPUT_NAME, differentiable
from .tiles import Tile, TileSource, is_arithmetic, visits
from .varying import vary, varying
from .xla_seam import LN2, LOG2E, as_bits, compute_dtype, exp2, from_bits, held_in_loop

__all__ = ["Blocking", "BlockwisePart", "bias_gradient", "blockwise_attention"]


@dataclass(frozen=True)
class Blocking:
    """Tile sizes: query rows, keys, and kv heads worked on together."""

    block_q: int
    block_kv: int
    heads: int


@dataclass(frozen=True)
class _Static:
    """All that is known at trace time."""

    layout: str
    scale: float
    soft_cap: float | None
    softmax_dtype: np.dtype
    platform: str
    forward: Blocking | Pieces
    backward: Blocking
    places: Places


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    layout: str,
    scale: float,
    mask: LocalMask,
    bias: jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    dropout: Dropout | None,
    softmax_dtype: np.dtype,
    platform: str,
    forward: Blocking | Pieces,
    backward: Blocking,
) -> tuple[jax.Array, jax.Array]:
    """Return (output in the layout, lse [batch, heads, q] in the softmax dtype), both differentiable in reverse.

    Query, key, value in `layout` (bthd or bhtd); bias broadcasts to [batch, heads, q, kv]; sinks [heads]. Fully masked
    rows give output 0, lse -inf (or that of the sink) and zero gradients.
    """
    kernel = BlockwisePart(layout, float(scale), soft_cap, np.dtype(softmax_dtype), platform, forward, backward)
    operands = Operands(query, key, value, bias, None if sinks is None else sinks.astype(softmax_dtype))
    return differentiable(kernel, operands, mask, dropout)


@dataclass(frozen=True)
class BlockwisePart:
    """The same as a PartKernel."""

    layout: str
    scale: float
    soft_cap: float | None
    softmax_dtype: np.dtype
    platform: str
    forward: Blocking | Pieces
    backward: Blocking

    @property
    def names(self) -> tuple[str, str]:
        """See PartKernel."""
        return OUTPUT_NAME, LSE_NAME

    def attend(self, places: Places, operands: Operands, traced: Traced) -> tuple[jax.Array, jax.Array]:
        """See PartKernel."""
        return _forward(self._static(places), operands, traced)

    def differentiate(
        self,
        places: Places,
        operands: Operands,
        traced: Traced,
        output: jax.Array,
        lse: jax.Array,
        d_output: jax.Array,
        d_lse: jax.Array,
    ) -> Operands:
        """See PartKernel."""
        return _backward(self._static(places), operands, traced, output, lse, d_output, d_lse)

    def _static(self, places: Places) -> _Static:
        return _Static(**vars(self), places=places)


def bias_gradient(
    places: Places,
    operands: Operands,
    traced: Traced,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
    *,
    scale: float,
    soft_cap: float | None,
    platform: str,
    blocking: Blocking,
) -> jax.Array:
    """Return the gradient of the bias alone, for a kernel that doesn't make it. All arrays bhtd; results: output and lse.

    Where a compiler drops what nobody reads, it costs nothing unless it is asked for.
    """
    static = _Static("bhtd", scale, soft_cap, np.dtype(np.float32), platform, blocking, blocking, places)
    gradient = _backward(static, operands, traced, *results, *cotangents).bias
    assert gradient is not None
    return gradient


# -- both passes -------------------------------------------------------------------------------------------------------


class _Pass:
    """One pass's view of the operands: shapes, tiles in and out, and the logits of a tile."""

    def __init__(
        self, static: _Static, blocking: Blocking, operands: Operands, traced: Traced, *, apart: bool = True
    ) -> None:
        self.static, self.blocking, self.operands = static, blocking, operands
        self.time = static.layout.index("t")
        self.head = static.layout.index("h")
        query, key, value = operands[:3]
        self.batch = query.shape[0]
        self.heads, self.kv_heads = query.shape[self.head], key.shape[self.head]
        self.group = self.heads // self.kv_heads
        self.dim, self.value_dim = query.shape[-1], value.shape[-1]
        self.groups = self.kv_heads // blocking.heads
        self.tile_heads = blocking.heads * self.group
        self.rows = self.group * blocking.block_q  # of one kv head
        self.q_blocks = -(-static.places.q_len // blocking.block_q)
        self.kv_blocks = -(-static.places.kv_len // blocking.block_kv)
        self.q_padded = self.q_blocks * blocking.block_q
        self.kv_padded = self.kv_blocks * blocking.block_kv
        self.dtype = np.dtype(static.softmax_dtype)
        self.compute = compute_dtype(query.dtype, self.dtype, static.platform)
        mask, dropout = put_together(static.places, traced)
        self.source = TileSource(mask, dropout, blocking.block_q, blocking.block_kv)
        self.visits = visits(mask, blocking.block_q, blocking.block_kv, apart=apart)
        self.bias = None if operands.bias is None else self.source.pad(operands.bias)
        self.axes = varying(operands)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> jax.Array:
        """A constant that varies over the mesh as the operands do, so that it can be a loop's first value."""
        return vary(jnp.full(shape, value, dtype), self.axes)

    def each_group(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Fold over (batch row, group of kv heads)."""
        count = self.batch * self.groups
        return fold(count, lambda n, c: step(*split_index(n, self.groups, self.batch), c), carry)

    def each_q_block(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        return fold(self.q_blocks, step, carry)

    def each_live(self, batch: Any, q_block: Any, step: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
        """Fold over the kv blocks that a query block sees: (kv block, carry, whether a mask is needed)."""
        plan = self.visits
        if self.kv_blocks == 1:  # its mask says all: no loop, whatever is known only at run time
            known = plan.some_partial or plan.some_full
            return step(0, carry, plan.some_partial) if known else carry
        table = plan.table
        partial: Any  # where they begin and end in a row, known or traced
        live: Any
        if isinstance(table, np.ndarray) and (table == table[:1, :1]).all():
            row = jnp.asarray(table[0, 0])  # all query blocks see the same: nothing to look up but the kv block
            partial, live = (int(n) for n in table[0, 0, :2])
        else:
            place = (batch if table.shape[0] > 1 else 0, q_block, 0)
            row = cut(jnp.asarray(table), place, (1, 1, table.shape[2])).reshape(-1)
            partial, live = (lax.index_in_dim(row, n, keepdims=False) for n in (0, 1))

        def visit(masked: bool) -> Callable[[Any, Any], Any]:
            return lambda n, c: step(lax.squeeze(cut_along(row, n, 1), (0,)), c, masked)

        if plan.some_partial:
            carry = loop(2, partial, visit(True), carry)
        if plan.some_full:
            carry = loop(partial if plan.some_partial else 2, live, visit(False), carry)
        return carry

    def take(self, x: jax.Array, batch: Any, group: Any, heads: int, length: int) -> jax.Array:
        """All rows of some heads, together: [heads, length, dim] in the compute dtype, as bits."""
        part = self._cut(x, batch, group * heads, heads, 0, x.shape[self.time])
        if self.compute != x.dtype:
            part = from_bits(part, x.dtype).astype(self.compute)
        short = length - part.shape[1]
        return jnp.pad(part, ((0, 0), (0, short), (0, 0))) if short else part

    def _cut(self, x: jax.Array, batch: Any, head: Any, heads: int, row: Any, rows: int) -> jax.Array:
        """Some heads' rows, as bits: [heads, rows, dim]."""
        platform, dim = self.static.platform, x.shape[-1]
        x = held_in_loop(x, head, row, platform)
        if self.head == 1:
            return as_bits(lax.squeeze(cut(x, (batch, head, row, 0), (1, heads, rows, dim)), (0,)), platform)
        # Of bthd as [batch, time, heads * dim]: XLA:CPU copies these runs 5 to 10 % of a forward pass faster.
        flat = cut(x.reshape(*x.shape[:2], -1), (batch, row, head * dim), (1, rows, heads * dim))
        return as_bits(flat, platform).reshape(rows, heads, dim).transpose(1, 0, 2)

    def keys(self, x: jax.Array, kv_block: Any) -> jax.Array:
        """The keys (or values) of a tile, from what `take` gave: [kv heads, block_kv, dim]."""
        size = self.blocking.block_kv
        return from_bits(cut_along(x, kv_block * size, size, 1), self.compute)

    def padded_queries(self, x: jax.Array) -> jax.Array:
        """Fill the queries up to whole blocks."""
        short = self.q_padded - x.shape[self.time]
        return jnp.pad(x, [(0, short if i == self.time else 0) for i in range(4)]) if short else x

    def queries(self, x: jax.Array, batch: Any, group: Any, q_block: Any) -> jax.Array:
        """The query rows of a tile: [kv heads, group * block_q, dim]."""
        size = self.blocking.block_q
        part = self._cut(x, batch, group * self.tile_heads, self.tile_heads, q_block * size, size)
        part = from_bits(part, x.dtype).astype(self.compute)
        return part.reshape(self.blocking.heads, self.rows, x.shape[-1])

    def put_queries(self, whole: jax.Array, rows: jax.Array, batch: Any, group: Any, q_block: Any) -> jax.Array:
        """Write the rows of a tile into an array in the layout."""
        part = rows.reshape(self.tile_heads, self.blocking.block_q, rows.shape[-1])
        part = (part if self.head == 1 else part.transpose(1, 0, 2))[None]
        part = as_bits(part.astype(self.operands.query.dtype), self.static.platform)
        starts = [batch, 0, 0, 0]
        starts[self.time], starts[self.head] = q_block * self.blocking.block_q, group * self.tile_heads
        return put(whole, part, starts)

    def row_values(self, x: jax.Array, batch: Any, group: Any, q_block: Any) -> jax.Array:
        """One number a row of a tile, of [batch, heads, padded q]: [kv heads, group * block_q]."""
        starts = (batch, group * self.tile_heads, q_block * self.blocking.block_q)
        part = cut(x, starts, (1, self.tile_heads, self.blocking.block_q))
        return part.reshape(self.blocking.heads, self.rows)

    def put_row_values(self, whole: jax.Array, rows: jax.Array, batch: Any, group: Any, q_block: Any) -> jax.Array:
        part = rows.reshape(1, self.tile_heads, self.blocking.block_q).astype(whole.dtype)
        return put(whole, part, (batch, group * self.tile_heads, q_block * self.blocking.block_q))

    def tile(self, batch: Any, group: Any, q_block: Any, kv_block: Any) -> Tile:
        return Tile(batch, group * self.tile_heads, self.tile_heads, q_block, kv_block)

    def spread(self, x: jax.Array) -> jax.Array:
        """[kv heads, group * block_q, n] as [heads, block_q, n]."""
        return x.reshape(self.tile_heads, self.blocking.block_q, x.shape[-1])

    def logits(self, query: jax.Array, key: jax.Array, tile: Tile, masked: bool) -> tuple[jax.Array, float, Any]:
        """(x, factor, tanh): the logits in base 2 are x * factor; tanh is the soft cap's, for its gradient."""
        static = self.static
        raw = dot(query, key, 2, self.dtype)
        x, factor, capped = raw, static.scale * LOG2E, None
        if static.soft_cap is not None:
            capped = jnp.tanh(raw * (static.scale / static.soft_cap))
            x, factor = capped, static.soft_cap * LOG2E
        if self.bias is not None:
            bias = self.source.cut(self.bias, tile).astype(self.dtype) * LOG2E
            x, factor = (self.spread(x * factor) + bias).reshape(x.shape), 1.0
        if masked:
            seen = self.source.seen(tile)
            if seen is not None:
                if factor <= 0:
                    x, factor = x * factor, 1.0
                x = where(seen, self.spread(x), -jnp.inf).reshape(x.shape)
        return (x, factor, capped) if factor > 0 else (x * factor, 1.0, capped)

    def exp2(self, x: jax.Array) -> jax.Array:
        return exp2(x, self.static.platform, accurate=self.compute.itemsize >= 4)

    def dropped(self, x: jax.Array, keep: jax.Array | None) -> jax.Array:
        """Weights, or their gradients, after dropout."""
        if keep is None:
            return x
        kept = where(keep, self.spread(x), 0) / (1.0 - self.static.places.dropout)
        return kept.reshape(x.shape).astype(x.dtype)


# -- forward -----------------------------------------------------------------------------------------------------------


def _forward(static: _Static, operands: Operands, traced: Traced) -> tuple[jax.Array, jax.Array]:
    if isinstance(static.forward, Pieces):
        mask, dropout = put_together(static.places, traced)
        return decode_forward(
            operands.query,
            operands.key,
            operands.value,
            layout=static.layout,
            scale=static.scale,
            mask=mask,
            bias=operands.bias,
            soft_cap=static.soft_cap,
            sinks=operands.sinks,
            dropout=dropout,
            softmax_dtype=static.softmax_dtype,
            platform=static.platform,
            pieces=static.forward,
        )
    work = _Pass(static, static.forward, operands, traced)
    heads, rows = work.blocking.heads, work.rows
    query = work.padded_queries(operands.query)

    def of_group(batch: Any, group: Any, outputs: tuple[jax.Array, jax.Array]) -> Any:
        key = work.take(operands.key, batch, group, heads, work.kv_padded)
        value = work.take(operands.value, batch, group, heads, work.kv_padded)

        def of_q_block(q_block: Any, outputs: tuple[jax.Array, jax.Array]) -> Any:
            q = work.queries(query, batch, group, q_block)

            def of_tile(kv_block: Any, carry: Any, masked: bool) -> Any:
                acc, peak, total = carry
                tile = work.tile(batch, group, q_block, kv_block)
                x, factor, _ = work.logits(q, work.keys(key, kv_block), tile, masked)
                new_peak = jnp.maximum(peak, x.max(axis=-1) * factor)
                # A row that has seen nothing yet keeps shift 0: its exponentials are 0, not NaN.
                shift = where(new_peak != -jnp.inf, new_peak, 0)
                p = work.exp2(x * factor - shift[..., None])
                shrink = jnp.exp2(peak - shift)
                total = total * shrink + p.sum(axis=-1)
                p = work.dropped(p, work.source.keep(tile)).astype(work.compute)
                step = dot(p, work.keys(value, kv_block), 1, work.dtype)
                return acc * shrink[..., None] + step, new_peak, total

            carry = (
                work.full((heads, rows, work.value_dim), 0, work.dtype),
                *_first_row_sums(work, batch, group),
            )
            acc, peak, total = work.each_live(batch, q_block, of_tile, carry)
            live = total != 0
            safe = where(live, total, 1)
            lse = where(live, peak * LN2 + jnp.log(safe), -jnp.inf)
            return (
                work.put_queries(outputs[0], acc / safe[..., None], batch, group, q_block),
                work.put_row_values(outputs[1], lse, batch, group, q_block),
            )

        return work.each_q_block(of_q_block, outputs)

    shape = (*query.shape[:-1], work.value_dim)
    output = as_bits(work.full(shape, 0, operands.query.dtype), static.platform)
    lse = work.full((work.batch, work.heads, work.q_padded), 0, work.dtype)
    output, lse = work.each_group(of_group, (output, lse))
    output = from_bits(_first(output, static.places.q_len, work.time), operands.query.dtype)
    return output, _first(lse, static.places.q_len, 2)


def _first(x: jax.Array, length: int, axis: int) -> jax.Array:
    """x without what it was filled up with."""
    return x if x.shape[axis] == length else lax.slice_in_dim(x, 0, length, axis=axis)


def _first_row_sums(work: _Pass, batch: Any, group: Any) -> tuple[jax.Array, jax.Array]:
    """(peak, total) of rows that have seen no key: a sink is a key without a value."""
    heads, rows = work.blocking.heads, work.rows
    if work.operands.sinks is None:
        return work.full((heads, rows), -jnp.inf, work.dtype), work.full((heads, rows), 0, work.dtype)
    sinks = cut_along(work.operands.sinks, group * work.tile_heads, work.tile_heads) * LOG2E
    peak = jnp.broadcast_to(sinks[:, None], (work.tile_heads, work.blocking.block_q)).reshape(heads, rows)
    return peak.astype(work.dtype), work.full((heads, rows), 1, work.dtype)


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(
    static: _Static,
    operands: Operands,
    traced: Traced,
    output: jax.Array,
    lse: jax.Array,
    d_output: jax.Array,
    d_lse: jax.Array,
) -> Operands:
    # In the forward pass XLA:CPU reads and writes a masked tile once more before the row's greatest logit is found. Here the
    # mask is part of the exponential, so that tiles with a mask and without need not be two loops of five products each.
    apart = not is_arithmetic(static.places.mask)
    work = _Pass(static, static.backward, operands, traced, apart=apart)
    heads, blocks, size = work.blocking.heads, work.kv_blocks, work.blocking.block_kv
    time, head = work.time, work.head
    query, output, d_output = (work.padded_queries(x) for x in (operands.query, output, d_output))
    short = work.q_padded - static.places.q_len
    # A row without keys has no weights, nor has a padded one: exp(x - inf) is 0.
    d_lse, padded_lse = d_lse.astype(work.dtype), where(lse != -jnp.inf, lse, jnp.inf)
    if short:
        d_lse, padded_lse = (
            jnp.pad(x, ((0, 0), (0, 0), (0, short)), constant_values=fill)
            for x, fill in ((d_lse, 0), (padded_lse, jnp.inf))
        )
    d_sinks = None if operands.sinks is None else jnp.zeros_like(operands.sinks)

    def of_group(batch: Any, group: Any, gradients: Any) -> Any:
        key = work.take(operands.key, batch, group, heads, work.kv_padded)
        value = work.take(operands.value, batch, group, heads, work.kv_padded)

        def of_q_block(q_block: Any, carry: Any) -> Any:
            d_key, d_value, d_query, d_bias, d_sinks = carry
            q = work.queries(query, batch, group, q_block)
            d_out = work.queries(d_output, batch, group, q_block)
            out = work.queries(output, batch, group, q_block)
            row_lse = work.row_values(padded_lse, batch, group, q_block)
            delta = (out.astype(work.dtype) * d_out.astype(work.dtype)).sum(-1)
            delta = delta - work.row_values(d_lse, batch, group, q_block)
            shift = row_lse * LOG2E
            # Left factors with the contracted dimension last: XLA:CPU would copy the other factor otherwise, a tile large.
            q_across, d_out_across = lax.optimization_barrier((q.swapaxes(1, 2), d_out.swapaxes(1, 2)))

            def of_tile(kv_block: Any, carry: Any, masked: bool) -> Any:
                d_q, d_key, d_value, d_bias = carry
                tile = work.tile(batch, group, q_block, kv_block)
                k, v = work.keys(key, kv_block), work.keys(value, kv_block)
                x, factor, capped = work.logits(q, k, tile, masked)
                p = work.exp2(x * factor - shift[..., None])
                keep = work.source.keep(tile)
                d_p = work.dropped(dot(d_out, v, 2, work.dtype), keep)
                d_x = p * (d_p - delta[..., None])
                if d_bias is not None:
                    d_bias = _add_bias_gradient(work, d_bias, d_x, tile)
                if capped is not None:
                    d_x = d_x * (1 - capped * capped)
                p, d_x = work.dropped(p, keep).astype(work.compute), d_x.astype(work.compute)
                d_q = d_q + dot(d_x, k, 1, work.dtype)
                d_value = _add_block(d_value, dot(d_out_across, p, 1, work.dtype), kv_block)
                d_key = _add_block(d_key, dot(q_across, d_x, 1, work.dtype), kv_block)
                return d_q, d_key, d_value, d_bias

            start = work.full((heads, work.rows, work.dim), 0, work.dtype)
            d_q, d_key, d_value, d_bias = work.each_live(batch, q_block, of_tile, (start, d_key, d_value, d_bias))
            d_query = work.put_queries(d_query, d_q * static.scale, batch, group, q_block)
            if d_sinks is not None:
                d_sinks = _add_sink_gradient(work, d_sinks, row_lse, delta, group)
            return d_key, d_value, d_query, d_bias, d_sinks

        d_query, d_key, d_value, d_bias, d_sinks = gradients
        start = (
            work.full((blocks, heads, work.dim, size), 0, work.dtype),
            work.full((blocks, heads, work.value_dim, size), 0, work.dtype),
        )
        carry = work.each_q_block(of_q_block, (*start, d_query, d_bias, d_sinks))
        of_key, of_value, d_query, d_bias, d_sinks = carry
        return (
            d_query,
            put_keys(d_key, of_key * static.scale, batch, group),
            put_keys(d_value, of_value, batch, group),
            d_bias,
            d_sinks,
        )

    def put_keys(whole: jax.Array, blocks_across: jax.Array, batch: Any, group: Any) -> jax.Array:
        """Write [kv blocks, kv heads, dim, block_kv] into an array in the layout."""
        dim = whole.shape[-1]
        order = (1, 0, 3, 2) if head == 1 else (0, 3, 1, 2)
        part = as_bits(blocks_across.astype(operands.key.dtype), static.platform).transpose(order)
        part = part.reshape((heads, work.kv_padded, dim) if head == 1 else (work.kv_padded, heads, dim))[None]
        starts = [batch, 0, 0, 0]
        starts[head] = group * heads
        return put(whole, _first(part, static.places.kv_len, time), starts)

    d_bias = None if work.bias is None else work.full(work.bias.shape, 0, work.dtype)
    gradients = (
        *(as_bits(work.full(x.shape, 0, x.dtype), static.platform) for x in (query, operands.key, operands.value)),
        d_bias,
        None if d_sinks is None else work.full(d_sinks.shape, 0, work.dtype),
    )
    d_query, d_key, d_value, d_bias, d_sinks = work.each_group(of_group, gradients)
    d_query = _first(d_query, static.places.q_len, time)
    d_query, d_key, d_value = (
        from_bits(bits, x.dtype) for bits, x in zip((d_query, d_key, d_value), operands[:3], strict=True)
    )
    if operands.bias is not None:
        d_bias = d_bias[tuple(slice(n) for n in operands.bias.shape)].astype(operands.bias.dtype)
    if operands.sinks is not None:
        d_sinks = d_sinks.astype(operands.sinks.dtype)
    return Operands(d_query, d_key, d_value, d_bias, d_sinks)


def _add_block(whole: jax.Array, part: jax.Array, block: Any) -> jax.Array:
    """whole[block] += part."""
    old = cut_along(whole, block, 1)
    return put(whole, old + part[None], (block, *(0,) * part.ndim))


def _add_bias_gradient(work: _Pass, d_bias: jax.Array, d_logits: jax.Array, tile: Tile) -> jax.Array:
    """Add a tile's gradient, summed over the dimensions in which the bias broadcasts."""
    old = work.source.cut(d_bias, tile)
    part = work.spread(d_logits)
    part = part.sum(axis=tuple(i for i in range(3) if old.shape[i] == 1 and part.shape[i] > 1), keepdims=True)
    return put(d_bias, (old + part)[None], work.source.start(d_bias, tile))


def _add_sink_gradient(work: _Pass, d_sinks: jax.Array, lse: jax.Array, delta: jax.Array, group: Any) -> jax.Array:
    """Add the rows of a query block: a sink's weight is exp(sink - lse) and its value 0."""
    assert work.operands.sinks is not None
    start = group * work.tile_heads
    sinks = cut_along(work.operands.sinks, start, work.tile_heads)
    weight = jnp.exp(sinks[:, None] - lse.reshape(work.tile_heads, -1))
    part = -(weight * delta.reshape(work.tile_heads, -1)).sum(-1)
    return put(d_sinks, cut_along(d_sinks, start, work.tile_heads) + part, (start,))
