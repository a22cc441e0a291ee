"""The backward passes: gradients from the weights, which are recomputed from the lse.

One pass by kv block computes the gradients of key and value, summed over the query heads that share them; one by query block
computes that of the query. Neither adds to what another program writes, so results don't depend on the order of programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...kernels.scores import without_padded_rows
from .arrays import Along, Arrays
from .flash_sizes import DimPart, HeadParts
from .tile import Logits, Tile, product, seen_rows, zeroing
from .tile_schedule import TileSchedule
from .weigh import weigh

__all__ = ["KeyGradients", "QueryGradient"]


@dataclass(frozen=True)
class _BackwardKernel:
    arrays: Arrays
    logits: Logits
    table: TileSchedule
    group: int
    parts: HeadParts

    def _zeros(self, count: int, parts: tuple[DimPart, ...]) -> tuple[Any, ...]:
        return tuple(jnp.zeros((count, part.width), jnp.float32) for part in parts)

    def _keys(
        self, refs: dict[str, Any], batch: Any, kv_head: Any, keys: Along, bounded: bool, seen: Any
    ) -> tuple[list[Any], list[Any]]:
        """Keys and values."""
        key = self.arrays.tile(refs["key"], batch, kv_head, keys, self.parts.key, bounded, seen)
        if self.parts.in_key:
            return key, key[: len(self.parts.value)]
        return key, self.arrays.tile(refs["value"], batch, kv_head, keys, self.parts.value, bounded, seen)

    def _gradient(self, refs: dict[str, Any], tile: Tile, raw: Any, d_p: Any, masked: int) -> tuple[Any, Any]:
        """(weights after dropout, gradient of the logits without the scale) from the products of a tile."""
        place = (tile.batch, tile.head)
        shift = tile.of_rows(Arrays.numbers(refs["lse"], place, tile.rows, float("inf")))
        delta = tile.of_rows(Arrays.numbers(refs["delta"], place, tile.rows))
        x, factor, pull = weigh(tile, raw, masked)
        x = without_padded_rows(self.logits.static_args.score, x, shift)
        p = self.logits.exp2(x, factor, shift)
        keep = tile.keep()
        return tile.dropped(p, keep), pull(p * (tile.dropped(d_p, keep) - delta))


@dataclass(frozen=True)
class QueryGradient(_BackwardKernel):
    """One program: the rows of a query block of one head. Grid: (query blocks, heads, batch)."""

    def __call__(self, refs: dict[str, Any]) -> None:
        arrays, sizes, static_args = self.arrays, self.arrays.sizes, self.logits.static_args
        place, head, batch = (pl.program_id(axis) for axis in range(3))
        q_block = pl.num_programs(0) - 1 - place
        kv_head = lax.div(head, self.group) if self.group > 1 else head
        rows = Along(q_block * sizes.block_q, sizes.block_q, static_args.q_len)
        query = arrays.tile(refs["query"], batch, head, rows, self.parts.key)
        d_output = arrays.tile(refs["d_output"], batch, head, rows, self.parts.value)

        def visit(kv_block: Any, sums: Any, masked: bool, zero: bool) -> Any:
            keys = Along(kv_block * sizes.block_kv, sizes.block_kv, static_args.kv_len)
            tile = Tile(self.logits, refs, batch, head, kv_head, rows, keys)
            seen = seen_rows(refs, batch, kv_head, keys) if masked and zero else None
            key, value = self._keys(refs, batch, kv_head, keys, masked, seen)
            _, d_x = self._gradient(refs, tile, product(query, key, 1, 1), product(d_output, value, 1, 1), masked)
            d_x = d_x.astype(query[0].dtype)
            return tuple(acc + product([d_x], [part], 1, 0) for acc, part in zip(sums, key, strict=True))

        usual, instead = zeroing(refs, visit)
        start = self._zeros(sizes.block_q, self.parts.key)
        sums = self.table.fold_tiles(refs["schedule"], batch, head, q_block, 0, 1, usual, start, instead)
        arrays.put_tile(refs["d_query"], batch, head, rows, self.parts.key, [acc * self.logits.scale for acc in sums])


@dataclass(frozen=True)
class KeyGradients(_BackwardKernel):
    """One program: the keys of a kv block of one kv head. Grid: (kv blocks, kv heads, batch)."""

    def __call__(self, refs: dict[str, Any]) -> None:
        arrays, sizes, static_args = self.arrays, self.arrays.sizes, self.logits.static_args
        kv_block, kv_head, batch = (pl.program_id(axis) for axis in range(3))
        keys = Along(kv_block * sizes.block_kv, sizes.block_kv, static_args.kv_len)
        seen = seen_rows(refs, batch, kv_head, keys)
        key, value = self._keys(refs, batch, kv_head, keys, True, seen)
        in_key, scale = self.parts.in_key, self.logits.scale

        def of_head(number: Any, sums: Any) -> Any:
            head = kv_head * self.group + number

            def visit(q_block: Any, sums: Any, masked: int) -> Any:
                d_key, d_value = (sums, sums[: len(value)]) if in_key else sums
                rows = Along(q_block * sizes.block_q, sizes.block_q, static_args.q_len)
                tile = Tile(self.logits, refs, batch, head, kv_head, rows, keys, transposed=True)
                query = arrays.tile(refs["query"], batch, head, rows, self.parts.key)
                d_output = arrays.tile(refs["d_output"], batch, head, rows, self.parts.value)
                p, d_x = self._gradient(refs, tile, product(key, query, 1, 1), product(value, d_output, 1, 1), masked)
                # Where values are a part of keys, so are their gradients, which have no scale: the logits' have it at once.
                p, d_x = p.astype(key[0].dtype), (d_x * scale if in_key else d_x).astype(key[0].dtype)
                d_value = tuple(acc + product([p], [part], 1, 0) for acc, part in zip(d_value, d_output, strict=True))
                d_key = (*d_value, *d_key[len(value) :]) if in_key else d_key
                d_key = tuple(acc + product([d_x], [part], 1, 0) for acc, part in zip(d_key, query, strict=True))
                return d_key if in_key else (d_key, d_value)

            return self.table.fold_tiles(refs["schedule"], batch, head, kv_block, 0, 1, visit, sums)

        of_key, of_value = (self._zeros(sizes.block_kv, parts) for parts in (self.parts.key, self.parts.value))
        start = of_key if in_key else (of_key, of_value)
        sums = lax.fori_loop(0, self.group, of_head, start) if self.group > 1 else of_head(0, start)
        if in_key:
            arrays.put_tile(refs["d_key"], batch, kv_head, keys, self.parts.key, list(sums))
            return
        d_key, d_value = sums
        arrays.put_tile(refs["d_key"], batch, kv_head, keys, self.parts.key, [acc * scale for acc in d_key])
        arrays.put_tile(refs["d_value"], batch, kv_head, keys, self.parts.value, list(d_value))
