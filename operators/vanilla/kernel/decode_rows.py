"""The forward pass of a few queries against many keys on a CPU: one batch row and block of keys after another, in place.

XLA:CPU's products want the keys of a head next to each other, so that a product over heads copies the whole cache first; and a
product with a block-diagonal query multiplies every key by every head's rows. Sums of slices do neither. A key's product
with a row is the sum of a few products of 8 lanes each, which are read where they lie and fill the vector registers; the weighted
values of a block are the sum of its eighths. What a block makes stays in the cores' caches.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....masks import Full
from ....scores.steps import Steps
from ...kernels.blocking import BlockwiseMethod
from ...kernels.derivatives import twice_forward_only
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.lse import divisor_and_lse, subtracted
from ...kernels.operands import Operands
from ...kernels.precision import exact
from ...kernels.primitives import cut, cut_along, fold, loop, put, where
from ...kernels.scores import BlockScores, apply_steps
from ...kernels.tiles import TilePosition, TileSource, tile_table
from ...kernels.varying import vary, varying
from .cpu_tuning import as_bits, held_in_loop, widened

__all__ = ["decode_rows_forward"]

_LANES = 8
_MAX_TERMS = 16  # of a sum of lanes: each is a few instructions of the program
_EIGHTHS = 8  # of a block's values: a core's first cache holds as many lines that begin at the same place of a page


class _Sums(NamedTuple):
    """Of one batch row. acc: weights times values, [n-th of an eighth, kv heads, rows, dim] or kv heads first; peak: the greatest
    logit, and total: the sum of the weights, [kv heads, rows]."""

    acc: jax.Array
    peak: jax.Array
    total: jax.Array


def decode_rows_forward(
    method: BlockwiseMethod,
    operands: Operands,
    mask: LocalMask,
    dropout: Dropout | None,
    block_kv: int,
    score: Steps | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (output in the layout, lse [batch, heads, q]); not differentiable by itself.

    block_kv: at most all keys, and a multiple of 8 unless there are fewer.
    """
    query, key, value, bias, sinks, *_ = operands
    layout, scale, soft_cap = method.layout, method.scale, method.soft_cap
    softmax_dtype, platform = method.softmax_dtype, method.platform
    head, time = layout.index("h"), layout.index("t") - 1  # time: within a batch row
    batch, heads, kv_heads = query.shape[0], query.shape[head], key.shape[head]
    q_len, group, dim = mask.q_len, heads // kv_heads, query.shape[-1]
    value_dim = method.value_columns or value.shape[-1]
    rows = group * q_len
    eighths = _EIGHTHS if block_kv % _EIGHTHS == 0 else 1
    compute = max(softmax_dtype, key.dtype, key=lambda dtype: dtype.itemsize)
    by_head = query if head == 1 else query.swapaxes(1, 2)
    all_rows = by_head.astype(compute).reshape(batch, kv_heads, rows, dim)
    if soft_cap is None:
        all_rows = all_rows * scale
    source = TileSource(mask, dropout, q_len, block_kv, in_place=True)
    scores = None
    if score is not None:
        scores = BlockScores(score, operands.captures, source, np.dtype(softmax_dtype), platform)
    table = tile_table(mask, q_len, block_kv, separate_full=False)
    hides = mask.hides_keys and not isinstance(mask.mask, Full)
    axes = varying((query, key, value, bias, sinks))

    def full(shape: tuple[int, ...], number: float, dtype: Any) -> jax.Array:
        return vary(jnp.full(shape, number, dtype), axes)

    def of_tokens(count: int) -> tuple[int, int]:
        return (count, kv_heads) if time == 0 else (kv_heads, count)

    def spread(x: jax.Array) -> jax.Array:
        """[1 | heads, 1 | q, 1 | keys] as [keys, kv heads, group, q], or kv heads first; dimensions of 1 are kept."""
        by_group = (1, 1) if x.shape[0] == 1 else (kv_heads, group)
        return x.reshape(*by_group, *x.shape[1:]).transpose((3, 0, 1, 2) if time == 0 else (0, 3, 1, 2))

    def tokens(x: jax.Array, row: Any, first: Any, count: int, lane: int = 0, width: int | None = None) -> jax.Array:
        """Some keys or values of a batch row: [count, kv heads, width], or kv heads first."""
        starts = (row, first, 0, lane) if time == 0 else (row, 0, first, lane)
        part = lax.squeeze(cut(x, starts, (1, *of_tokens(count), width or x.shape[-1])), (0,))
        return widened(as_bits(part, platform), compute)

    def logits(row: Any, first: Any, by_row: jax.Array) -> jax.Array:
        """[keys, kv heads, group, q], or kv heads first."""
        keys = held_in_loop(key, row, first, platform)
        if keys.dtype != compute:  # converted once, not for every row
            whole = lax.optimization_barrier(tokens(keys, row, first, block_kv))
        lanes = _LANES * -(-dim // (_LANES * _MAX_TERMS))
        terms = []
        for lane in range(0, dim, lanes):
            width = min(lanes, dim - lane)
            query_lane = lax.slice_in_dim(by_row, lane, lane + width, axis=2)
            if keys.dtype == compute:
                part = tokens(keys, row, first, block_kv, lane, width)
            else:
                part = lax.slice_in_dim(whole, lane, lane + width, axis=2)
            term = jnp.expand_dims(part, 2) * jnp.expand_dims(query_lane, time)
            terms.append(
                term if width == lanes else lax.pad(term, compute.type(0), [*[(0, 0, 0)] * 3, (0, lanes - width, 0)])
            )
        flat = lax.optimization_barrier(_total(terms)).reshape(-1, lanes)
        x = lax.dot(flat, jnp.ones(lanes, compute), precision=exact(compute)).astype(softmax_dtype)
        return x.reshape(*of_tokens(block_kv), group, q_len)

    def visit(row: Any, by_row: jax.Array, block: Any, sums: _Sums) -> _Sums:
        first, tile = source.first_key(block), TilePosition(row, 0, heads, 0, block)
        x = logits(row, first, by_row)
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x * (scale / soft_cap))
        if scores is not None:
            # Without a cap the scale is in the queries already.
            flat = x.transpose((1, 2, 3, 0) if time == 0 else (0, 2, 3, 1)).reshape(heads, q_len, block_kv)
            scored = apply_steps(scores.steps, flat, 1.0, 1.0, scores.tile(tile))
            x = spread(scored.x if scored.factor == 1 else scored.x * scored.factor)
        if bias is not None:
            x = x + spread(source.cut(bias, tile).astype(softmax_dtype))
        seen = source.seen(tile)
        if seen is not None:
            seen = spread(seen)
            x = where(seen, x, -jnp.inf)
        peak = jnp.maximum(sums.peak, x.max(time).reshape(kv_heads, rows))
        shift = subtracted(peak)
        # XLA takes exp, unlike the polynomial of exp2, for too expensive to be computed anew by each fusion that needs it.
        p = jnp.exp(x - jnp.expand_dims(shift.reshape(kv_heads, group, q_len), time))
        shrink = jnp.exp(sums.peak - shift)
        total = sums.total * shrink + p.sum(time).reshape(kv_heads, rows)
        if dropout is not None and (keep := source.keep(tile)) is not None:
            p = where(spread(keep), p, 0) / (1.0 - dropout.probability)
        p = p.astype(compute).reshape(*of_tokens(block_kv), rows)
        eighth, terms = block_kv // eighths, []
        values = held_in_loop(key if value is None else value, row, first, platform)
        alive = seen.any((2, 3))[..., None] if seen is not None and hides else None
        for i in range(eighths):
            weights = lax.slice_in_dim(p, i * eighth, (i + 1) * eighth, axis=time)
            part = tokens(values, row, first + i * eighth, eighth, 0, value_dim)
            if alive is not None:  # 0 times NaN is NaN
                part = where(lax.slice_in_dim(alive, i * eighth, (i + 1) * eighth, axis=time), part, 0)
            terms.append(weights[..., None] * jnp.expand_dims(part, 2))
        acc = sums.acc * jnp.expand_dims(shrink, time)[..., None] + _total(terms).astype(softmax_dtype)
        return _Sums(acc, peak, total)

    def of_row(row: Any, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        by_row = lax.squeeze(cut_along(all_rows, row, 1), (0,))
        sums = _Sums(
            full((*of_tokens(block_kv // eighths), rows, value_dim), 0, softmax_dtype),
            *_first_sums(sinks, full((kv_heads, group, q_len), 0, softmax_dtype)),
        )
        first, ends, block_of = table.tile_range(row, 0, 0)
        if table.some_partial or table.some_full:
            end = ends[0] if table.some_partial else ends[1]
            known = isinstance(first, int) and isinstance(end, int) and end - first > 1
            # XLA would unroll a loop of one step, and fuse the sum over a block with what comes before it.
            if not known:
                end = lax.optimization_barrier(jnp.asarray(end, np.int32))
            sums = loop(first, end, lambda n, sums: visit(row, by_row, block_of(n), sums), sums)
            sums = sums if known else twice_forward_only(sums)
        safe, lse = divisor_and_lse(sums.total, sums.peak)
        output = sums.acc.sum(time) / safe[..., None]
        outputs = put(results[0], output.astype(query.dtype)[None], (row, 0, 0, 0))
        return outputs, put(results[1], lse[None], (row, 0, 0))

    shape = batch, kv_heads, rows
    start = full((*shape, value_dim), 0, query.dtype), full(shape, 0, softmax_dtype)
    output, lse = fold(batch, of_row, start)
    output = output.reshape(batch, heads, q_len, value_dim)
    return output if head == 1 else output.swapaxes(1, 2), lse.reshape(batch, heads, q_len)


def _total(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _first_sums(sinks: jax.Array | None, zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(peak, total) before the first key, from zeros [kv heads, group, q]. A sink is a key without a value."""
    kv_heads, group, q_len = zeros.shape
    if sinks is None:
        peak, total = zeros - jnp.inf, zeros
    else:
        peak, total = zeros + sinks.astype(zeros.dtype).reshape(kv_heads, group, 1), zeros + 1
    return peak.reshape(kv_heads, group * q_len), total.reshape(kv_heads, group * q_len)
