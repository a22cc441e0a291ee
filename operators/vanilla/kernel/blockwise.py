"""Attention in blocks with an online softmax, forward and backward, on plain XLA.

The K and V of a group of kv heads (of all groups, if they are small) are copied together once: a stage. Then each query
block goes over the kv blocks that its rows can see; first those that need a mask, then those that don't. The logits exist for one
tile at a time. Logits are in base 2 (times log2 e), because exp2 is the cheaper exponential.

The recurrence is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); the backward pass
that recomputes the weights from the lse is that of Dao et al., "FlashAttention" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....symbolic import surely
from ...kernels.blocking import Blocking, BlockwiseMethod
from ...kernels.derivatives import twice_forward_only
from ...kernels.lse import LN2, LOG2E, divisor_and_lse, subtracted
from ...kernels.operands import DynamicArgs, Operands, Results, StaticArgs, join_static
from ...kernels.partial_attention import residual_names
from ...kernels.primitives import cut, cut_along, dot, fold, loop, put, row_dots, split_index, summed, where
from ...kernels.scores import BlockScores, apply_steps, without_padded_rows
from ...kernels.seen_keys import seen_keys
from ...kernels.tiles import TilePosition, TileSource, is_arithmetic, tile_table
from ...kernels.varying import vary, varying
from .cpu_tuning import as_bits, compute_dtype, exp2, from_bits, held_in_loop
from .decode import decode_forward
from .decode_rows import decode_rows_forward

__all__ = ["PartialBlockwise", "blockwise_gradients"]


@dataclass(frozen=True)
class _BlockwiseStatic(BlockwiseMethod):
    """Everything known at trace time."""

    static_args: StaticArgs = field(kw_only=True)


@dataclass(frozen=True)
class PartialBlockwise(BlockwiseMethod):
    """Blockwise attention as a PartialAttention.

    Query, key, value in `layout` (bthd or bhtd), value None with `value_columns`; bias broadcasts to [batch, heads, q, kv]; sinks
    [heads], in the softmax dtype, as the lse. Fully masked rows give output 0, lse -inf (or that of the sink) and zero gradients.
    """

    title: ClassVar[str] = "vanilla's blockwise path"

    @property
    def names(self) -> tuple[str, str]:
        """See PartialAttention."""
        return residual_names()

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        """See PartialAttention."""
        return _forward(self._static(static_args), operands, dynamic)

    def differentiate(
        self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
    ) -> Operands:
        """See PartialAttention."""
        return _backward(self._static(static_args), operands, dynamic, results)

    def _static(self, static_args: StaticArgs) -> _BlockwiseStatic:
        return _BlockwiseStatic(**vars(self), static_args=static_args)


def blockwise_gradients(
    static_args: StaticArgs,
    operands: Operands,
    dynamic: DynamicArgs,
    results: Results,
    *,
    scale: float,
    soft_cap: float | None,
    platform: str,
    blocking: Blocking,
    value_columns: int | None = None,
) -> Operands:
    """All gradients, for a kernel that doesn't compute some of them, those of the bias or of a score's arrays. All arrays bhtd.

    The compiler drops those that aren't used.
    """
    method = BlockwiseMethod("bhtd", scale, soft_cap, np.dtype(np.float32), platform, blocking, blocking, value_columns)
    static = _BlockwiseStatic(**vars(method), static_args=static_args)
    return _backward(static, operands, dynamic, results)


# -- both passes -------------------------------------------------------------------------------------------------------


class QueryBlock(NamedTuple):
    """Where a query block is: batch row, group of kv heads, the group's place in its stage, and block of the queries."""

    batch: Any
    group: Any
    slot: Any
    q_block: Any


# Bytes of keys, values and sums that are prepared together. A third level of loops costs XLA:CPU as much compile time as a
# fifth of a layer with projections; long keys are copied group by group, so that the copies take little memory.
_STAGED_TOGETHER = 2**24


class _BlockPass:
    """One pass's view of the operands: shapes, input and output tiles, and the logits of a tile."""

    def __init__(
        self,
        static: _BlockwiseStatic,
        blocking: Blocking,
        operands: Operands,
        dynamic: DynamicArgs,
        *,
        separate_full: bool = True,
        sums: bool = False,
    ) -> None:
        self.static, self.blocking, self.operands = static, blocking, operands
        self.time = static.layout.index("t")
        self.head = static.layout.index("h")
        query, key, value = operands[:3]
        self.batch = query.shape[0]
        self.heads, self.kv_heads = query.shape[self.head], key.shape[self.head]
        self.group = self.heads // self.kv_heads
        self.columns = static.value_columns
        self.dim, self.value_dim = query.shape[-1], self.columns or value.shape[-1]
        self.groups = self.kv_heads // blocking.heads
        self.tile_heads = blocking.heads * self.group
        self.rows = self.group * blocking.block_q  # per kv head
        self.q_blocks = -(-static.static_args.q_len // blocking.block_q)
        self.kv_blocks = -(-static.static_args.kv_len // blocking.block_kv)
        self.q_padded = self.q_blocks * blocking.block_q
        self.kv_padded = self.kv_blocks * blocking.block_kv
        self.dtype = np.dtype(static.softmax_dtype)
        self.compute = compute_dtype(query.dtype, self.dtype, static.platform)
        staged_dim = self.dim + (0 if self.columns else self.value_dim)
        staged = self.batch * self.kv_heads * self.kv_padded * staged_dim
        row_bytes = self.compute.itemsize + sums * self.dtype.itemsize
        all_staged = surely(lambda: staged * row_bytes <= _STAGED_TOGETHER)
        self.stages, self.slots = (1, self.batch * self.groups) if all_staged else (self.batch * self.groups, 1)
        mask, dropout = join_static(static.static_args, dynamic)
        tables = self.groups if mask.heads_differ else 1
        self.source = TileSource(mask, dropout, blocking.block_q, blocking.block_kv, tables=tables)
        self.table = tile_table(mask, blocking.block_q, blocking.block_kv, tables=tables, separate_full=separate_full)
        self.bias = None if operands.bias is None else self.source.pad(operands.bias)
        steps = static.static_args.score
        self.scores = None
        if steps is not None:
            self.scores = BlockScores(steps, operands.captures, self.source, self.dtype, static.platform)
        self.seen = seen_keys(mask, self.kv_heads, operands.of_keys)
        self.axes = varying(operands)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> jax.Array:
        """A constant that varies over the mesh like the operands, so that it can be a loop's first value."""
        return vary(jnp.full(shape, value, dtype), self.axes)

    def fold_stages(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Fold over the stages: one for each (batch row, group of kv heads), or one for all."""
        return fold(self.stages, step, carry)

    def fold_q_blocks(self, stage: Any, step: Callable[[QueryBlock, Any], Any], carry: Any) -> Any:
        """Fold over the query blocks of a stage."""

        def visit(n: Any, carry: Any) -> Any:
            slot, q_block = split_index(n, self.q_blocks, self.slots)
            place = split_index(stage if self.slots == 1 else slot, self.groups, self.batch)
            return step(QueryBlock(*place, slot, q_block), carry)

        return fold(self.slots * self.q_blocks, visit, carry)

    def fold_tiles(self, at: QueryBlock, step: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
        """Fold over the kv blocks that a query block sees: (kv block, carry, whether a mask is needed)."""
        plan = self.table
        if self.kv_blocks == 1:  # its mask is enough: no loop, even if it is known only at run time
            known = plan.some_partial or plan.some_full
            return step(0, carry, plan.some_partial) if known else carry
        first, ends, block = plan.tile_range(at.batch, at.group, at.q_block)

        def visit(begin: Any, end: Any, masked: bool, carry: Any) -> Any:
            carry = loop(begin, end, lambda n, c: step(block(n), c, masked), carry)
            known = isinstance(begin, int) and isinstance(end, int)
            return carry if known else twice_forward_only(carry)

        if plan.some_partial:
            carry = visit(first, ends[0], True, carry)
        if plan.some_full:
            carry = visit(ends[0] if plan.some_partial else first, ends[1], False, carry)
        return carry

    def take(self, x: jax.Array, stage: Any, *, clean: bool) -> jax.Array:
        """The keys or values of a stage: [slots, heads, padded keys, dim] in the compute dtype, as bits.

        clean: zeros where no query sees the key.
        """
        heads, length, dim = self.blocking.heads, x.shape[self.time], x.shape[-1]
        if self.slots == 1:
            batch, group = split_index(stage, self.groups, self.batch)
            part = self._cut(x, batch, group * heads, heads, 0, length)
        else:
            part = as_bits(x, self.static.platform)
            part = part if self.head == 1 else part.transpose(0, 2, 1, 3)
        part = part.reshape(self.slots, heads, length, dim)
        if self.compute != x.dtype:
            part = from_bits(part, x.dtype).astype(self.compute)
        if clean and self.seen is not None:
            part = where(self._seen_of_stage(self.seen.keys, stage), part, 0)
        short = self.kv_padded - length
        return jnp.pad(part, ((0, 0), (0, 0), (0, short), (0, 0))) if short else part

    def _seen_of_stage(self, seen: jax.Array, stage: Any) -> jax.Array:
        """Which of a stage's keys a query sees, in the shape of `take`."""
        heads, length = self.blocking.heads, seen.shape[2]
        if self.slots > 1 or self.stages == 1:
            seen = jnp.broadcast_to(seen, (self.batch, self.kv_heads, length))
            return seen.reshape(self.slots, heads, length, 1)
        batch, group = split_index(stage, self.groups, self.batch)
        many = not surely(lambda: seen.shape[0] == 1)
        place = (batch if many else 0, group * heads if seen.shape[1] > 1 else 0, 0)
        return cut(seen, place, (1, heads if seen.shape[1] > 1 else 1, length))[..., None]

    def _cut(self, x: jax.Array, batch: Any, head: Any, heads: int, row: Any, rows: int) -> jax.Array:
        """Some heads' rows, as bits: [heads, rows, dim]."""
        platform, dim = self.static.platform, x.shape[-1]
        x = held_in_loop(x, head, row, platform)
        if self.head == 1:
            return as_bits(lax.squeeze(cut(x, (batch, head, row, 0), (1, heads, rows, dim)), (0,)), platform)
        # View bthd as [batch, time, heads * dim]: XLA:CPU then copies faster.
        flat = cut(x.reshape(*x.shape[:2], -1), (batch, row, head * dim), (1, rows, heads * dim))
        return as_bits(flat, platform).reshape(rows, heads, dim).transpose(1, 0, 2)

    def keys(self, x: jax.Array, at: QueryBlock, kv_block: Any) -> jax.Array:
        """The keys (or values) of a tile, from the result of `take`: [kv heads, block_kv, dim]."""
        size = self.blocking.block_kv
        part = cut(x, (at.slot, 0, kv_block * size, 0), (1, x.shape[1], size, x.shape[-1]))
        return from_bits(lax.squeeze(part, (0,)), self.compute)

    def values(self, key: jax.Array, value: jax.Array | None, at: QueryBlock, kv_block: Any) -> jax.Array:
        """The values of a tile, which may be a part of its keys."""
        if value is not None:
            return self.keys(value, at, kv_block)
        return lax.slice_in_dim(self.keys(key, at, kv_block), 0, self.value_dim, axis=2)

    def padded_queries(self, x: jax.Array) -> jax.Array:
        """Pad the queries to whole blocks."""
        short = self.q_padded - x.shape[self.time]
        return jnp.pad(x, [(0, short if i == self.time else 0) for i in range(4)]) if short else x

    def queries(self, x: jax.Array, at: QueryBlock) -> jax.Array:
        """The query rows of a tile: [kv heads, group * block_q, dim]."""
        size = self.blocking.block_q
        part = self._cut(x, at.batch, at.group * self.tile_heads, self.tile_heads, at.q_block * size, size)
        part = from_bits(part, x.dtype).astype(self.compute)
        return part.reshape(self.blocking.heads, self.rows, x.shape[-1])

    def put_queries(self, whole: jax.Array, rows: jax.Array, at: QueryBlock) -> jax.Array:
        """Write the rows of a tile into an array in the layout."""
        part = rows.reshape(self.tile_heads, self.blocking.block_q, rows.shape[-1])
        part = (part if self.head == 1 else part.transpose(1, 0, 2))[None]
        part = as_bits(part.astype(self.operands.query.dtype), self.static.platform)
        starts = [at.batch, 0, 0, 0]
        starts[self.time], starts[self.head] = at.q_block * self.blocking.block_q, at.group * self.tile_heads
        return put(whole, part, starts)

    def row_values(self, x: jax.Array, at: QueryBlock) -> jax.Array:
        """One number per row of a tile, from [batch, heads, padded q]: [kv heads, group * block_q]."""
        part = cut(x, self._row_starts(at), (1, self.tile_heads, self.blocking.block_q))
        return part.reshape(self.blocking.heads, self.rows)

    def put_row_values(self, whole: jax.Array, rows: jax.Array, at: QueryBlock) -> jax.Array:
        part = rows.reshape(1, self.tile_heads, self.blocking.block_q).astype(whole.dtype)
        return put(whole, part, self._row_starts(at))

    def _row_starts(self, at: QueryBlock) -> tuple[Any, Any, Any]:
        """Where a tile's rows begin in [batch, heads, padded q]."""
        return at.batch, at.group * self.tile_heads, at.q_block * self.blocking.block_q

    def tile(self, at: QueryBlock, kv_block: Any) -> TilePosition:
        return TilePosition(at.batch, at.group * self.tile_heads, self.tile_heads, at.q_block, kv_block)

    def spread(self, x: jax.Array) -> jax.Array:
        """[kv heads, group * block_q, n] as [heads, block_q, n]."""
        return x.reshape(self.tile_heads, self.blocking.block_q, x.shape[-1])

    def mask_rows(self, seen: jax.Array) -> jax.Array:
        """bool [1 | heads, 1 | block_q, n] in a shape that broadcasts to [kv heads, group * block_q, n].

        Reshaping the logits instead would cost compile time: XLA's simplifier moves a reshape past one instruction per round.
        """
        heads, rows, n = seen.shape
        if heads == 1 and (rows == 1 or self.group == 1):
            return seen
        kv_heads = 1 if heads == 1 else self.blocking.heads
        spread = (kv_heads * self.group, self.blocking.block_q, n)
        return lax.broadcast_in_dim(seen, spread, (0, 1, 2)).reshape(kv_heads, self.rows, n)

    def logits(
        self, query: jax.Array, key: jax.Array, tile: TilePosition, masked: bool
    ) -> tuple[jax.Array, float, Any, Any]:
        """(x, factor, tanh, scored): the logits in base 2 are x * factor; tanh is the soft cap's, and `scored` the score's result
        in [heads, block_q, n], for their gradients."""
        static, scored = self.static, None
        raw = dot(query, key, 2, self.dtype)
        x, factor, capped = raw, static.scale * LOG2E, None
        if static.soft_cap is not None:
            capped = jnp.tanh(raw * (static.scale / static.soft_cap))
            x, factor = capped, static.soft_cap * LOG2E
        if self.scores is not None:
            natural = static.scale if capped is None else static.soft_cap
            assert natural is not None
            scored = apply_steps(self.scores.steps, self.spread(x), natural, LOG2E, self.scores.tile(tile))
            x, factor = scored.x.reshape(x.shape), scored.factor * (1.0 if scored.absorbed else LOG2E)
        if self.bias is not None:
            bias = self.source.cut(self.bias, tile).astype(self.dtype) * LOG2E
            x, factor = (self.spread(x * factor) + bias).reshape(x.shape), 1.0
        if masked:
            seen = self.source.seen(tile)
            if seen is not None:
                if factor <= 0:
                    x, factor = x * factor, 1.0
                x = where(self.mask_rows(seen), x, -jnp.inf)
        return (x, factor, capped, scored) if factor > 0 else (x * factor, 1.0, capped, scored)

    def exp2(self, x: jax.Array) -> jax.Array:
        return exp2(x, self.static.platform, accurate=self.compute.itemsize >= 4)

    def dropped(self, x: jax.Array, keep: jax.Array | None) -> jax.Array:
        """Weights, or their gradients, after dropout."""
        if keep is None:
            return x
        masked = where(keep, self.spread(x), 0) / (1.0 - self.static.static_args.dropout)
        return masked.reshape(x.shape).astype(x.dtype)


# -- forward -----------------------------------------------------------------------------------------------------------


def _forward(static: _BlockwiseStatic, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
    if not isinstance(static.forward, Blocking):
        mask, dropout = join_static(static.static_args, dynamic)
        of_few_queries = decode_rows_forward if static.forward.in_place else decode_forward
        return of_few_queries(static, operands, mask, dropout, static.forward.block_kv, static.static_args.score)
    block_pass = _BlockPass(static, static.forward, operands, dynamic)
    heads, rows = block_pass.blocking.heads, block_pass.rows
    query = block_pass.padded_queries(operands.query)

    def of_stage(stage: Any, outputs: tuple[jax.Array, jax.Array]) -> Any:
        # Hidden keys have weights of 0 whatever they hold; hidden values would be multiplied by these.
        key = block_pass.take(operands.key, stage, clean=block_pass.columns is not None)
        value = None if block_pass.columns is not None else block_pass.take(operands.value, stage, clean=True)

        def of_q_block(at: QueryBlock, outputs: tuple[jax.Array, jax.Array]) -> Any:
            q = block_pass.queries(query, at)

            def of_tile(kv_block: Any, carry: Any, masked: bool) -> Any:
                acc, peak, total = carry
                tile = block_pass.tile(at, kv_block)
                x, factor, *_ = block_pass.logits(q, block_pass.keys(key, at, kv_block), tile, masked)
                new_peak = jnp.maximum(peak, x.max(axis=-1) * factor)
                shift = subtracted(new_peak)
                p = block_pass.exp2(x * factor - shift[..., None])
                shrink = jnp.exp2(peak - shift)
                total = total * shrink + p.sum(axis=-1)
                p = block_pass.dropped(p, block_pass.source.keep(tile)).astype(block_pass.compute)
                step = dot(p, block_pass.values(key, value, at, kv_block), 1, block_pass.dtype)
                return acc * shrink[..., None] + step, new_peak, total

            carry = (
                block_pass.full((heads, rows, block_pass.value_dim), 0, block_pass.dtype),
                *_first_row_sums(block_pass, at.group),
            )
            acc, peak, total = block_pass.fold_tiles(at, of_tile, carry)
            safe, lse = divisor_and_lse(total, peak * LN2)
            return (
                block_pass.put_queries(outputs[0], acc / safe[..., None], at),
                block_pass.put_row_values(outputs[1], lse, at),
            )

        return block_pass.fold_q_blocks(stage, of_q_block, outputs)

    shape = (*query.shape[:-1], block_pass.value_dim)
    output = as_bits(block_pass.full(shape, 0, operands.query.dtype), static.platform)
    lse = block_pass.full((block_pass.batch, block_pass.heads, block_pass.q_padded), 0, block_pass.dtype)
    output, lse = block_pass.fold_stages(of_stage, (output, lse))
    output = from_bits(_first(output, static.static_args.q_len, block_pass.time), operands.query.dtype)
    return output, _first(lse, static.static_args.q_len, 2)


def _first(x: jax.Array, length: int, axis: int) -> jax.Array:
    """x without its padding."""
    return x if x.shape[axis] == length else lax.slice_in_dim(x, 0, length, axis=axis)


def _first_row_sums(block_pass: _BlockPass, group: Any) -> tuple[jax.Array, jax.Array]:
    """(peak, total) of rows that have seen no key: a sink is a key without a value."""
    heads, rows = block_pass.blocking.heads, block_pass.rows
    if block_pass.operands.sinks is None:
        return block_pass.full((heads, rows), -jnp.inf, block_pass.dtype), block_pass.full(
            (heads, rows), 0, block_pass.dtype
        )
    sinks = cut_along(block_pass.operands.sinks, group * block_pass.tile_heads, block_pass.tile_heads) * LOG2E
    peak = jnp.broadcast_to(sinks[:, None], (block_pass.tile_heads, block_pass.blocking.block_q)).reshape(heads, rows)
    return peak.astype(block_pass.dtype), block_pass.full((heads, rows), 1, block_pass.dtype)


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(static: _BlockwiseStatic, operands: Operands, dynamic: DynamicArgs, results: Results) -> Operands:
    output, lse, d_output, d_lse = results
    # In the forward pass XLA:CPU reads and writes a masked tile once more before the row's greatest logit is found. Here the
    # mask is part of the exponential, so masked and unmasked tiles need no separate loops of five products each.
    separate_full = not is_arithmetic(static.static_args.mask)
    block_pass = _BlockPass(static, static.backward, operands, dynamic, separate_full=separate_full, sums=True)
    heads, blocks, size = block_pass.blocking.heads, block_pass.kv_blocks, block_pass.blocking.block_kv
    time, head = block_pass.time, block_pass.head
    # For all rows at once: in the loop the output's rows would be copied first.
    delta = row_dots(output.astype(block_pass.dtype), d_output.astype(block_pass.dtype), static.platform)
    delta = (delta if head == 1 else delta.swapaxes(1, 2)) - d_lse.astype(block_pass.dtype)
    query, d_output = (block_pass.padded_queries(x) for x in (operands.query, d_output))
    short = block_pass.q_padded - static.static_args.q_len
    # Rows without keys and padded rows have no weights: exp(x - inf) is 0.
    padded_lse = where(lse != -jnp.inf, lse, jnp.inf)
    if short:
        delta, padded_lse = (
            jnp.pad(x, ((0, 0), (0, 0), (0, short)), constant_values=fill)
            for x, fill in ((delta, 0), (padded_lse, jnp.inf))
        )
    d_sinks = None if operands.sinks is None else jnp.zeros_like(operands.sinks)

    def of_stage(stage: Any, gradients: Any) -> Any:
        key, value = (None if x is None else block_pass.take(x, stage, clean=True) for x in operands[1:3])
        assert key is not None

        def of_q_block(at: QueryBlock, carry: Any) -> Any:
            d_key, d_value, d_query, d_bias, d_sinks, d_captures = carry
            q, d_out = (block_pass.queries(x, at) for x in (query, d_output))
            row_lse, row_delta = (block_pass.row_values(x, at) for x in (padded_lse, delta))
            shift = row_lse * LOG2E
            # Left factors with the contracted dimension last: otherwise XLA:CPU would copy the other factor, which is as large
            # as a tile.
            q_across, d_out_across = lax.optimization_barrier((q.swapaxes(1, 2), d_out.swapaxes(1, 2)))

            def of_tile(kv_block: Any, carry: Any, masked: bool) -> Any:
                d_q, d_key, d_value, d_bias, d_captures = carry
                tile = block_pass.tile(at, kv_block)
                k, v = block_pass.keys(key, at, kv_block), block_pass.values(key, value, at, kv_block)
                x, factor, capped, scored = block_pass.logits(q, k, tile, masked)
                x = without_padded_rows(static.static_args.score, x, shift[..., None])
                p = block_pass.exp2(x * factor - shift[..., None])
                keep = block_pass.source.keep(tile)
                d_p = block_pass.dropped(dot(d_out, v, 2, block_pass.dtype), keep)
                d_x = p * (d_p - row_delta[..., None])
                if d_bias is not None:
                    d_bias = _add_bias_gradient(block_pass, d_bias, d_x, tile)
                if scored is not None and block_pass.scores is not None:
                    of_score, shares = scored.pull(block_pass.spread(d_x))
                    for share in shares:
                        d_captures = block_pass.scores.tile(tile).add_share(d_captures, share)
                    d_x = of_score.reshape(d_x.shape)
                if capped is not None:
                    d_x = d_x * (1 - capped * capped)
                p, d_x = block_pass.dropped(p, keep).astype(block_pass.compute), d_x.astype(block_pass.compute)
                d_q = d_q + dot(d_x, k, 1, block_pass.dtype)
                of_value, of_key = dot(d_out_across, p, 1, block_pass.dtype), dot(q_across, d_x, 1, block_pass.dtype)
                if d_value is None:  # a part of the key's, and without its scale
                    d_key = _add_block(_add_block(d_key, of_key * static.scale, at, kv_block), of_value, at, kv_block)
                else:
                    d_value = _add_block(d_value, of_value, at, kv_block)
                    d_key = _add_block(d_key, of_key, at, kv_block)
                return d_q, d_key, d_value, d_bias, d_captures

            start = block_pass.full((heads, block_pass.rows, block_pass.dim), 0, block_pass.dtype)
            sums = (start, d_key, d_value, d_bias, d_captures)
            d_q, d_key, d_value, d_bias, d_captures = block_pass.fold_tiles(at, of_tile, sums)
            d_query = block_pass.put_queries(d_query, d_q * static.scale, at)
            if d_sinks is not None:
                d_sinks = _add_sink_gradient(block_pass, d_sinks, row_lse, row_delta, at.group)
            return d_key, d_value, d_query, d_bias, d_sinks, d_captures

        d_query, d_key, d_value, d_bias, d_sinks, d_captures = gradients
        start = (
            None if d is None else block_pass.full((block_pass.slots, blocks, heads, n, size), 0, block_pass.dtype)
            for d, n in ((d_key, block_pass.dim), (d_value, block_pass.value_dim))
        )
        carry = block_pass.fold_q_blocks(stage, of_q_block, (*start, d_query, d_bias, d_sinks, d_captures))
        of_key, of_value, d_query, d_bias, d_sinks, d_captures = carry
        return (
            d_query,
            put_keys(d_key, of_key if of_value is None else of_key * static.scale, stage),
            None if of_value is None else put_keys(d_value, of_value, stage),
            d_bias,
            d_sinks,
            d_captures,
        )

    def put_keys(whole: jax.Array, sums: jax.Array, stage: Any) -> jax.Array:
        """Write a stage's [slots, kv blocks, kv heads, dim, block_kv] into an array in the layout."""
        batch, dim = (block_pass.batch if block_pass.stages == 1 else 1), whole.shape[-1]
        sums = as_bits(sums.astype(operands.key.dtype), static.platform).reshape(batch, -1, *sums.shape[1:])
        part = sums.transpose((0, 1, 3, 2, 5, 4) if head == 1 else (0, 2, 5, 1, 3, 4))
        part = part.reshape(
            (batch, -1, block_pass.kv_padded, dim) if head == 1 else (batch, block_pass.kv_padded, -1, dim)
        )
        part = _first(part, static.static_args.kv_len, time)
        if block_pass.stages == 1:
            return part
        starts = [*split_index(stage, block_pass.groups, block_pass.batch), 0, 0]
        starts[1], starts[head] = 0, starts[1] * heads
        return put(whole, part, starts)

    d_bias = None if block_pass.bias is None else block_pass.full(block_pass.bias.shape, 0, block_pass.dtype)
    gradients = (
        *(
            None if x is None else as_bits(block_pass.full(x.shape, 0, x.dtype), static.platform)
            for x in (query, operands.key, operands.value)
        ),
        d_bias,
        None if d_sinks is None else block_pass.full(d_sinks.shape, 0, block_pass.dtype),
        tuple(
            block_pass.full(x.shape, 0, block_pass.dtype)
            for x in (block_pass.scores.arrays if block_pass.scores else ())
        ),
    )
    d_query, d_key, d_value, d_bias, d_sinks, d_captures = block_pass.fold_stages(of_stage, gradients)
    d_query = _first(d_query, static.static_args.q_len, time)
    d_query, d_key = (from_bits(d, x.dtype) for d, x in zip((d_query, d_key), operands[:2], strict=True))
    d_value = None if d_value is None else from_bits(d_value, operands.value.dtype)
    if operands.bias is not None:
        d_bias = d_bias[tuple(slice(n) for n in operands.bias.shape)].astype(operands.bias.dtype)
    if operands.sinks is not None:
        d_sinks = d_sinks.astype(operands.sinks.dtype)
    if block_pass.scores is not None:
        d_captures = block_pass.scores.unpadded(d_captures)
        d_captures = tuple(d.astype(x.dtype) for d, x in zip(d_captures, operands.captures, strict=True))
    return Operands(d_query, d_key, d_value, d_bias, d_sinks, captures=d_captures)


def _add_block(whole: jax.Array, part: jax.Array, at: QueryBlock, kv_block: Any) -> jax.Array:
    """whole[slot, kv block] += part."""
    start = (at.slot, kv_block, *(0,) * part.ndim)
    return put(whole, cut(whole, start, (1, 1, *part.shape)) + part[None, None], start)


def _add_bias_gradient(block_pass: _BlockPass, d_bias: jax.Array, d_logits: jax.Array, tile: TilePosition) -> jax.Array:
    """Add a tile's gradient, summed over the dimensions in which the bias broadcasts."""
    old = block_pass.source.cut(d_bias, tile)
    part = block_pass.spread(d_logits)
    for axis in (i for i in range(3) if old.shape[i] == 1 and part.shape[i] > 1):
        part = summed(part, axis)
    return put(d_bias, (old + part)[None], block_pass.source.start(d_bias, tile))


def _add_sink_gradient(
    block_pass: _BlockPass, d_sinks: jax.Array, lse: jax.Array, delta: jax.Array, group: Any
) -> jax.Array:
    """Add the rows of a query block: a sink's weight is exp(sink - lse) and its value 0."""
    assert block_pass.operands.sinks is not None
    start = group * block_pass.tile_heads
    sinks = cut_along(block_pass.operands.sinks, start, block_pass.tile_heads)
    weight = jnp.exp(sinks[:, None] - lse.reshape(block_pass.tile_heads, -1))
    part = -(weight * delta.reshape(block_pass.tile_heads, -1)).sum(-1)
    return put(d_sinks, cut_along(d_sinks, start, block_pass.tile_heads) + part, (start,))
