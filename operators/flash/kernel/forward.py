"""The forward pass: online softmax over the live tiles of each query block, with the keys in one part or in several.

int8 and fp8 keys and values are converted to the query's dtype here, exactly. A key's scale is applied to its logits, a value's
to the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...kernels.lse import LN2, LOG2E
from .arrays import Along, Arrays
from .flash_sizes import HeadParts, TileSteps
from .fp8 import from_bits
from .tile import Logits, Tile, product, seen_rows, zeroing
from .tile_schedule import TileSchedule
from .weigh import weigh

__all__ = ["ForwardKernel"]


@dataclass(frozen=True)
class ForwardKernel:
    """One program: the rows of a query block of one head, and one of `splits` parts of its tiles.

    Grid: (query blocks * splits, heads, batch). period: rows hold the queries of all heads of a kv head, each with that many
    rows; the grid's heads are then kv heads.
    """

    arrays: Arrays
    logits: Logits
    table: TileSchedule
    q_blocks: int
    q_rows: int  # in a head, or, folded, in all heads of a kv head
    group: int
    splits: int
    parts: HeadParts
    stored: tuple[str, str]  # dtypes of key and value
    period: int | None
    steps: TileSteps

    def __call__(self, refs: dict[str, Any]) -> None:
        arrays, logits, sizes = self.arrays, self.logits, self.arrays.sizes
        place, head, batch = (pl.program_id(axis) for axis in range(3))
        split, q_block = (0, place) if self.splits == 1 else (place % self.splits, place // self.splits)
        q_block = (
            self.q_blocks - 1 - q_block
        )  # under a causal mask the last blocks have the most keys, so they start first
        kv_head = head if self.period is not None else lax.div(head, self.group) if self.group > 1 else head
        first_head = head * self.group if self.period is not None else head
        rows = Along(q_block * sizes.block_q, sizes.block_q, self.q_rows)
        query = arrays.tile(refs["query"], batch, head, rows, self.parts.key)

        def key_of(keys: Along, masked: bool, zero: bool) -> list[jax.Array]:
            hides = self.parts.in_key and masked and zero
            seen = seen_rows(refs, batch, kv_head, keys) if hides else None
            key = arrays.tile(refs["key"], batch, kv_head, keys, self.parts.key, masked, seen)
            return self._stored(key, self.stored[0], query[0].dtype)

        def value_of(keys: Along, masked: bool, zero: bool) -> list[jax.Array]:
            # The weights of hidden keys are 0, whatever the keys hold; the values would be multiplied by these.
            seen = seen_rows(refs, batch, kv_head, keys) if masked and zero else None
            value = arrays.tile(refs["value"], batch, kv_head, keys, self.parts.value, masked, seen)
            value = self._stored(value, self.stored[1], query[0].dtype)
            if "value_scale" not in refs:
                return value
            scale = arrays.numbers(refs["value_scale"], (batch, kv_head), keys)[:, None]
            scale = scale if seen is None else jnp.where(seen[:, None], scale, 0.0)
            return [(x.astype(jnp.float32) * scale).astype(query[0].dtype) for x in value]

        def add(keys: Along, key: list[jax.Array], raw: jax.Array, carry: Any, masked: bool, zero: bool) -> Any:
            sums, peak, total = carry
            tile = Tile(logits, refs, batch, first_head, kv_head, rows, keys, period=self.period)
            x, factor, _ = weigh(tile, raw, masked)
            new_peak = jnp.maximum(peak, x.max(axis=1) * factor)
            # A row without visible keys so far keeps shift 0: its exponentials are 0, not NaN. In a tile that the mask leaves
            # whole there are no such rows.
            hidden = masked or "bias" in refs or logits.static_args.score is not None
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak) if hidden else new_peak
            shrink = logits.exp2(peak, 1.0, shift)[:, None]
            sums, total = tuple(acc * shrink for acc in sums), total * shrink
            p, keep = logits.exp2(x, factor, shift[:, None]), tile.keep()
            parts = keys.parts(self.steps.products)
            keep_parts = [None] * len(parts) if keep is None else _columns(keep, len(parts))
            for some, weights, left in zip(parts, _columns(p, len(parts)), keep_parts, strict=True):
                total = total + self._summed(weights)
                weights = tile.dropped(weights, left).astype(query[0].dtype)
                value = key[: len(sums)] if self.parts.in_key else value_of(some, masked, zero)
                sums = tuple(acc + product([weights], [part], 1, 0) for acc, part in zip(sums, value, strict=True))
            return sums, new_peak, total

        def visit(kv_block: Any, carry: Any, masked: bool, zero: bool) -> Any:
            keys = Along(kv_block * sizes.block_kv, sizes.block_kv, logits.static_args.kv_len)
            parts = keys.parts(self.steps.softmaxes)
            tiles = (key_of(part, masked, zero) for part in parts)
            products = ((key, product(query, key, 1, 1)) for key in tiles)
            # Where there are fewest stalls: with a mask all of them come first, else each right before its softmax.
            for part, (key, x) in zip(parts, list(products) if masked else products, strict=True):
                carry = add(part, key, x, carry, masked, zero)
            return carry

        usual, instead = zeroing(refs, visit)
        carry = self._start(refs, first_head, rows, split)
        block = 0 if self.period is not None else q_block
        sums, peak, total = self.table.fold_tiles(
            refs["schedule"], batch, head, block, split, self.splits, usual, carry, instead
        )
        total = total.sum(axis=1)
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        lse = jnp.where(visible, (peak + jnp.log2(safe)) * LN2, -jnp.inf)
        # The table has no negative numbers, which the compiler doesn't know: it computes the output's addresses here. Those of
        # the query are the same, and would take registers in the loops. So would one division for each number of the output.
        nothing, part = jnp.minimum(refs["schedule"][0, 0, 0, 1], 0), (1.0 / safe)[:, None]
        rows, head = Along(rows.start + nothing, rows.count, rows.length), head + nothing
        row = batch if self.splits == 1 else split * pl.num_programs(2) + batch
        arrays.put_tile(refs["output"], row, head, rows, self.parts.value, [acc * part for acc in sums])
        arrays.put_numbers(refs["lse"], (row, head), rows, lse)

    def _start(self, refs: dict[str, Any], first_head: Any, rows: Along, split: Any) -> Any:
        """(weighted sums, peak, total) of rows that have seen no key: a sink is a key without a value.

        total: [rows, lanes], added up after the loops.
        """
        count = rows.count
        sums = tuple(jnp.zeros((count, part.width), jnp.float32) for part in self.parts.value)
        if "sinks" not in refs:
            return sums, jnp.full((count,), -jnp.inf, jnp.float32), jnp.zeros((count, self.steps.lanes), jnp.float32)
        if self.period is None:
            sink = jnp.full((count,), refs["sinks"][first_head])
        else:
            sink = refs["sinks"][first_head + jnp.minimum(rows.indices // self.period, self.group - 1)]
        sink = sink * LOG2E
        if self.splits > 1:
            sink = jnp.where(split == 0, sink, -jnp.inf)
        total = jnp.where(sink == -jnp.inf, 0.0, 1.0 / self.steps.lanes)
        return sums, sink, jnp.broadcast_to(total[:, None], (count, self.steps.lanes))

    def _summed(self, weights: jax.Array) -> jax.Array:
        """[rows, lanes]"""
        (rows, keys), lanes = weights.shape, self.steps.lanes
        return weights.reshape(rows, keys // lanes, lanes).sum(axis=1) if lanes > 1 else weights.sum(axis=1)[:, None]

    @staticmethod
    def _stored(tile: list[jax.Array], dtype: str, target_dtype: Any) -> list[jax.Array]:
        return [
            from_bits(x, dtype, target_dtype) if dtype.startswith("float8") else x.astype(target_dtype) for x in tile
        ]


def _columns(x: jax.Array, number: int) -> list[jax.Array]:
    """Equal parts of a tile, each with some of its columns."""
    return [x] if number == 1 else list(lax.split(x, [x.shape[1] // number] * number, axis=1))
