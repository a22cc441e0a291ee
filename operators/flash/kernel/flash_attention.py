"""PartialFlash: the kernels combined, with those of their gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ....scores.steps import Steps
from ...kernels.block_words import block_words
from ...kernels.folded_rows import FoldedRows
from ...kernels.local_mask import Dropout, LocalMask
from ...kernels.lse import merge_stacked
from ...kernels.operands import DynamicArgs, Operands, StaticArgs, join_static
from ...kernels.seen_keys import Seen, seen_keys
from .arrays import KERNELS, Arrays
from .backward import KeyGradients, QueryGradient
from .flash_sizes import FlashSizes, HeadParts, TileSizes
from .forward import ForwardKernel
from .fp8 import as_bits
from .partial_gpu import Gradients, PartialGpu
from .score_tile import add_captures
from .tile import Logits, Words, add_arrays
from .tile_schedule import TileSchedule, tile_schedule

__all__ = ["PartialFlash"]


@dataclass(frozen=True)
class PartialFlash(PartialGpu):
    """These kernels as a PartialAttention."""

    sizes: FlashSizes = field(kw_only=True)
    title: ClassVar[str] = KERNELS

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        """See PartialAttention."""
        mask, _ = join_static(static_args, dynamic)
        sizes = self.sizes.forward
        if self.sizes.fold:  # to the mask all queries are one block, whatever their head
            return self._attend_folded(static_args, operands, dynamic)
        tables = _tables(mask, operands.query.shape[self.layout.index("h")])
        table = tile_schedule(mask, sizes.block_q, sizes.block_kv, "q", tables)
        words = block_words(mask, sizes.block_q, sizes.block_kv, mask.q_len, tables)
        return self._forward(static_args, operands, dynamic, table, words, _seen(self, operands, mask), None)

    def gradients(
        self,
        static_args: StaticArgs,
        operands: Operands,
        dynamic: DynamicArgs,
        d_output: jax.Array,
        shift: jax.Array,
        delta: jax.Array,
    ) -> Gradients:
        """See PartialGpu."""
        return _Backward(self, static_args, operands, dynamic, d_output, shift, delta)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward(
        self,
        static_args: StaticArgs,
        operands: Operands,
        dynamic: DynamicArgs,
        table: TileSchedule,
        words: Words,
        seen: Seen | None,
        period: int | None,
    ) -> tuple[jax.Array, jax.Array]:
        """period: the queries of a kv head's heads follow each other as one head, each with that many rows."""
        sizes, splits = self.sizes.forward, self.sizes.kv_splits
        mask, dropout = join_static(static_args, dynamic)
        query, (time, head) = operands.query, (self.layout.index("t"), self.layout.index("h"))
        batch, heads, rows = query.shape[0], query.shape[head], query.shape[time]
        parts_of_head = _head_parts(self, operands)
        value_dim = self.value_columns or operands.value.shape[3]
        group = heads // operands.key.shape[head] if period is None else rows // period
        arrays = _arrays(self, sizes, operands, mask, words, seen, dropout, static_args.score)
        arrays.inputs["schedule"] = table.table
        if operands.sinks is not None:
            arrays.inputs["sinks"] = operands.sinks
        parts = [batch * splits, heads, rows]
        shape = [parts[0], 0, 0, value_dim]
        shape[time], shape[head] = rows, heads
        dtype = query.dtype if splits == 1 else jnp.float32
        arrays.output("output", tuple(shape), dtype, {time: sizes.block_q}, parts_of_head.value)
        arrays.output("lse", tuple(parts), jnp.float32, {2: sizes.block_q})
        q_blocks = -(-rows // sizes.block_q)
        kernel = ForwardKernel(
            arrays,
            Logits(self.scale, self.soft_cap, static_args, self.interpret),
            table,
            q_blocks,
            rows,
            group,
            splits,
            parts_of_head,
            (operands.key.dtype.name, (operands.key if self.value_columns else operands.value).dtype.name),
            period,
            self.sizes.steps,
        )
        outputs = arrays.run("attnops_flash_forward", kernel, (q_blocks * splits, heads, batch))
        output, lse = _first(outputs["output"], tuple(shape)), _first(outputs["lse"], tuple(parts))
        if splits == 1:
            return output, lse
        output, lse = (x.reshape(splits, batch, *x.shape[1:]) for x in (output, lse))
        output, lse = merge_stacked(output, lse, self.layout)
        return output.astype(query.dtype), lse

    def _attend_folded(
        self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs
    ) -> tuple[jax.Array, jax.Array]:
        """See FoldedRows."""
        folded, q_len, block_kv = FoldedRows.of(self.layout, operands), static_args.q_len, self.sizes.forward.block_kv
        mask, _ = join_static(static_args, dynamic)
        tables = _tables(mask, folded.kv_heads)
        table = tile_schedule(mask, q_len, block_kv, "q", tables)
        words = tuple(
            leaf_words and leaf_words._replace(words=folded.words(leaf_words.words))
            for leaf_words in block_words(mask, q_len, block_kv, q_len, tables)
        )
        leaves = tuple(folded.array(jnp.asarray(leaf.array), leaf.dims) for leaf in mask.mask.split()[1])
        seen = _seen(self, operands, mask)  # by the queries of all heads
        operands, dynamic = folded.operands(operands, static_args.score), dynamic._replace(leaves=leaves)
        output, lse = self._forward(static_args, operands, dynamic, table, words, seen, q_len)
        return folded.output(output), folded.numbers(lse)


def _tables(mask: LocalMask, heads: int) -> int:
    """How many tile schedules there are: one per head if heads have different blocks."""
    return heads if mask.heads_differ else 1


def _arrays(
    part: PartialFlash,
    sizes: TileSizes,
    operands: Operands,
    mask: LocalMask,
    words: Words,
    seen: Seen | None,
    dropout: Dropout | None,
    score: Steps | None,
) -> Arrays:
    """The arrays that every pass reads."""
    arrays = Arrays(sizes, part.layout, part.interpret)
    parts = _head_parts(part, operands)
    arrays.rows_of_heads("query", operands.query, sizes.block_q, parts.key)
    arrays.rows_of_heads("key", as_bits(operands.key), sizes.block_kv, parts.key)
    if operands.value is not None:
        arrays.rows_of_heads("value", as_bits(operands.value), sizes.block_kv, parts.value)
    for name, scale in (("key_scale", operands.key_scale), ("value_scale", operands.value_scale)):
        if scale is not None:
            arrays.row_numbers(name, scale.astype(jnp.float32), sizes.block_kv)
    add_arrays(arrays, mask, words, operands.bias, dropout, seen)
    if score is not None:
        add_captures(arrays, score, operands.captures)
    return arrays


def _head_parts(part: PartialFlash, operands: Operands) -> HeadParts:
    columns = part.value_columns
    return HeadParts.of(operands.query.shape[3], columns or operands.value.shape[3], columns is not None)


def _seen(part: PartialFlash, operands: Operands, mask: LocalMask) -> Seen | None:
    return seen_keys(mask, operands.key.shape[part.layout.index("h")], operands.of_keys)


def _first(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x without its padding."""
    return x if x.shape == shape else lax.slice(x, (0,) * x.ndim, shape)


# -- backward ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Backward:
    part: PartialFlash
    static_args: StaticArgs
    operands: Operands
    dynamic: DynamicArgs
    d_output: jax.Array
    shift: jax.Array
    delta: jax.Array

    def of_query(self) -> jax.Array:
        """The gradient of the query."""
        sizes, query = self.part.sizes.dq, self.operands.query
        arrays, rest = self._prepare(sizes, "q")
        time, head = (self.part.layout.index(dim) for dim in "th")
        parts = _head_parts(self.part, self.operands)
        arrays.output("d_query", query.shape, query.dtype, {time: sizes.block_q}, parts.key)
        grid = (-(-query.shape[time] // sizes.block_q), query.shape[head], query.shape[0])
        outputs = arrays.run("attnops_flash_dq", QueryGradient(arrays, *rest), grid)
        return _first(outputs["d_query"], query.shape)

    def of_keys(self) -> tuple[jax.Array, jax.Array | None]:
        """The gradients of key and value; None where that is a part of the key's."""
        sizes, key, value = self.part.sizes.dkv, self.operands.key, self.operands.value
        parts = _head_parts(self.part, self.operands)
        arrays, rest = self._prepare(sizes, "kv")
        time, head = (self.part.layout.index(dim) for dim in "th")
        for name, x, of_head in (("d_key", key, parts.key), ("d_value", value, parts.value)):
            if x is not None:
                arrays.output(name, x.shape, x.dtype, {time: sizes.block_kv}, of_head)
        grid = (-(-key.shape[time] // sizes.block_kv), key.shape[head], key.shape[0])
        outputs = arrays.run("attnops_flash_dkv", KeyGradients(arrays, *rest), grid)
        d_value = None if value is None else _first(outputs["d_value"], value.shape)
        return _first(outputs["d_key"], key.shape), d_value

    def _prepare(self, sizes: TileSizes, slow: str) -> tuple[Arrays, tuple[Any, ...]]:
        part, operands = self.part, self.operands
        mask, dropout = join_static(self.static_args, self.dynamic)
        tables = _tables(mask, operands.query.shape[part.layout.index("h")])
        words = block_words(mask, sizes.block_q, sizes.block_kv, mask.q_len, tables)
        seen, score = _seen(part, operands, mask), self.static_args.score
        arrays = _arrays(part, sizes, operands, mask, words, seen, dropout, score)
        parts = _head_parts(part, operands)
        arrays.rows_of_heads("d_output", self.d_output, sizes.block_q, parts.value)
        arrays.row_numbers("lse", self.shift, sizes.block_q)
        arrays.row_numbers("delta", self.delta, sizes.block_q)
        table = tile_schedule(mask, sizes.block_q, sizes.block_kv, slow, tables)
        arrays.inputs["schedule"] = table.table
        head = part.layout.index("h")
        group = operands.query.shape[head] // operands.key.shape[head]
        logits = Logits(part.scale, part.soft_cap, self.static_args, part.interpret)
        return arrays, (logits, table, group, parts)
