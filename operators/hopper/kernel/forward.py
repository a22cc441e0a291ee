"""The forward pass: online softmax over the tiles of keys that a block of rows sees.

A warpgroup that computes has 64 rows of its own; the keys are shared. While one waits for its products, the tensor cores' next
work is that of another, so the softmax of one runs beside the products of the other. Of one warpgroup the exponentials of a tile
that all rows see whole run beside the product for the next one's logits, and beside that one's maximum: a multiprocessor
computes 16 exponentials a cycle, so that they shouldn't wait for anything. J. Shah et al., FlashAttention-3, 2024, 3.2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked, Overlapped
from ...flash.kernel.weigh import weigh
from ...kernels.lse import LN2, LOG2E
from ...mosaic.kernel.block import LOWEST, along_rows, in_ring
from ...mosaic.kernel.mosaic_sizes import column_parts
from ...mosaic.kernel.seen_parts import ALL_SEEN, SeenParts
from ...mosaic.kernel.spans import all_spans
from .block import HopperBlock, filled, zeros
from .hopper_sizes import ROWS
from .tensor_cores import tensor_cores
from .tile import BY_ROW, HopperTile

__all__ = ["HopperForward"]

_TOGETHER = 256  # columns with which the warpgroups share a program
_BESIDE = 32  # columns whose exponentials are computed beside the next product
_BESIDE_SPANS = 16  # the same where the next tile's spans are computed there
# Of a tile's columns those whose exponentials are computed beside the hiding of others; and where sums take more registers.
_BESIDE_HIDING = 1 / 4, 3 / 8
_EIGHT = 8  # columns of which a thread has two
_TURN = 16  # columns whose exponentials are computed before others' maximum
_IN_REGISTERS = {"bias", "dropout"}  # what takes registers beside a tile
_NARROW = 64  # columns beside which ids and positions have registers too


@dataclass(frozen=True)
class HopperForward(HopperBlock):
    """`block_q` rows of a query head, or of the query heads of a kv head, against one part of the keys or all.

    Where a warpgroup can't hold the sums of a row's output, several have 64 rows together: each computes the logits, and has a
    part of the output's columns.
    """

    def __call__(self, refs: dict[str, Any]) -> None:
        if "rows" in refs:  # the output's place is that of the query
            refs = {**refs, **dict(zip(("query_tile", "output_tile"), refs["rows"], strict=True))}
        super().__call__(refs)

    @property
    def apart(self) -> bool:
        """See HopperBlock."""
        return max(self.dims) > _TOGETHER

    @property
    def column_parts(self) -> int:
        """Warpgroups that have the same rows."""
        return column_parts(self.dims[1])

    @property
    def consumers(self) -> int:
        """See HopperBlock."""
        return super().consumers * self.column_parts

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        batch, head, q_block = place
        first_row = q_block * self.sizes.block_q
        for group in range(self.consumers // self.column_parts):
            rows = self.rows(refs["query"], batch, head, first_row + group * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(rows, refs["query_tile"].at[group], refs["query_full"].at[group])
        self.load_keys(refs, place)

    def store(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        batch, head, q_block = place
        output, width = refs.get("output_tile", refs["query_tile"]), self.dims[1] // self.column_parts
        for warpgroup in range(self.consumers):
            group, part = divmod(warpgroup, self.column_parts)
            first_row = q_block * self.sizes.block_q + group * ROWS
            plgpu.barrier_wait(refs["output_full"].at[warpgroup])
            if self.splits == 1:
                target = self.rows(refs["output"], batch, head, first_row, ROWS)
                plgpu.copy_smem_to_gmem(output.at[warpgroup], target.at[:, pl.ds(part * width, width)])
            if part == 0:
                written = refs["lse"].at[self.of_split(batch, refs["lse"]), head, pl.ds(first_row, ROWS)]
                plgpu.copy_smem_to_gmem(refs["lse_rows"].at[warpgroup], written)
        plgpu.wait_smem_to_gmem(0)

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """See HopperBlock."""
        batch, head, q_block = place
        group, part = (warpgroup, 0) if self.column_parts == 1 else (0, warpgroup)
        first_row = q_block * self.sizes.block_q + group * ROWS
        query, ready = refs["query_tile"].at[group], refs["query_full"].at[group]
        plgpu.barrier_wait(ready)
        width, last = self.dims[1] // self.column_parts, self.streams[-1]
        refs = HopperTile.with_numbers(refs, self.logits.static_args.mask, batch, first_row)
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)
        in_loop, wide = self.query_in_loop, max(self.dims) > _NARROW

        def tile_of(kv_block: Any, masked: Masked) -> HopperTile:
            return HopperTile(
                self.logits, refs, (batch, head), first_row, kv_block * sizes.block_kv, sizes, columns,
                period=self.period, group=self.group, by_ids=masked is Masked.BY_IDS,
            )  # fmt: skip

        def products_of(
            kv_block: Any, count: Any, masked: int, values: Any, work: Callable[[], Any] = lambda: None
        ) -> tuple[jax.Array, Any]:
            """(the products of the count-th tile, what work() made beside them). values: the number of the tile whose values are
            waited for."""
            slot = in_ring(count, sizes.stages, from_zero=not masked)
            plgpu.barrier_wait(refs["key_full"].at[slot])
            rows = self.in_loop(refs["query_tile"], group, kv_block) if in_loop else query
            (raw,), made = products.logits_beside(work, (rows, refs["key_tiles"].at[slot]))
            if not self.in_key:
                plgpu.barrier_arrive(refs["key_free"].at[slot])
                if values is not None:
                    plgpu.barrier_wait(refs["value_full"].at[in_ring(values, sizes.stages, from_zero=not masked)])
            return raw, made

        def shifted(peak: jax.Array, x: jax.Array, top: jax.Array, factor: float) -> tuple[jax.Array, ...]:
            """(exponents, new peak, factor of the sums so far) of logits x * factor. top: see `_top`."""
            new_peak = jnp.maximum(peak, top.max(axis=1) * factor)
            return x * factor - along_rows(new_peak, x.shape), new_peak, jnp.exp2(peak - new_peak)

        def summed(total: jax.Array, shrink: jax.Array, weights: jax.Array) -> jax.Array:
            """One by one, as exponentials come."""
            return total * along_rows(shrink, total.shape) + functools.reduce(jnp.add, _eights(weights))

        def add_values(count: Any, masked: int, sums: jax.Array, shrink: jax.Array, weights: jax.Array) -> jax.Array:
            """With the count-th tile's values, whose place is then free."""
            slot = in_ring(count, sizes.stages, from_zero=not masked)
            values = refs[f"{last}_tiles"].at[slot]
            if values.shape[1] != width:
                values = values.at[:, pl.ds(part * width, width)]
            shrunk = sums * along_rows(shrink, sums.shape)
            (sums,) = products.add_values((shrunk, (weights.astype(query.dtype), values)))
            plgpu.barrier_arrive(refs[f"{last}_free"].at[slot])
            return sums

        def visit(kv_block: Any, carry: Any, masked: Masked) -> Any:
            count, sums, peak, total = carry
            tile, by_ids = tile_of(kv_block, masked), masked is Masked.BY_IDS
            raw, ids = products_of(kv_block, count, masked, count, lambda: tile.span() if by_ids else None)
            x, factor, _ = weigh(tile, raw, masked)
            x = tile.within(x, ids) if by_ids else _hidden(tile, tile.cut(), x)[0] if masked else x
            exponents, peak, shrink = shifted(peak, x, _top(x), factor)
            weights = jnp.exp2(exponents)
            total = total * shrink + weights.sum(axis=1)
            sums = add_values(count, masked, sums, shrink, tile.dropped(weights, tile.keep()))
            return count + 1, sums, peak, total

        # Where tiles overlap, nothing but a positive scale and a mask is applied to logits.
        scale, masks = self.logits.scale * LOG2E, self.masks_overlap(refs)

        def begin(kv_block: Any, carry: Any) -> Any:
            count, sums, peak, total = carry
            seen = tile_of(kv_block, Masked.YES).cut(not wide) if masks else ALL_SEEN
            raw, _ = products_of(kv_block, count, masks, None)
            x = _hidden(tile_of(kv_block, Masked.YES), seen, raw)[0] if masks else raw
            total = along_rows(total / _EIGHT, (ROWS, _EIGHT))
            return count + 1, sums, total, *shifted(peak, x, _top(x), scale)

        def visit_and_end(kv_block: Any, carry: Any, masked: Masked) -> Any:
            count, sums, total, exponents, peak, shrink = carry
            first = _BESIDE_SPANS if masked else _BESIDE
            second = first + int(sizes.block_kv * _BESIDE_HIDING[wide]) * bool(masked)

            def beside() -> tuple[jax.Array, SeenParts]:
                seen = tile_of(kv_block, masked).cut(not wide) if masked else ALL_SEEN
                return jnp.exp2(exponents[:, :first]), seen

            raw, (early, seen) = products_of(kv_block, count, masked, count - 1, beside)
            x = raw
            if masked:
                more = functools.partial(jnp.exp2, exponents[:, first:second])
                x, some = _hidden(tile_of(kv_block, masked), seen, raw, more)
                early = jnp.concatenate([early, some], axis=1)
            weights, top = _exponentials_and_top(early, exponents, x, _TURN if masked or wide else 2 * _TURN)
            total = summed(total, shrink, weights)
            sums = add_values(count - 1, masked, sums, shrink, weights)
            return count + 1, sums, total, *shifted(peak, x, top, scale)

        def end(carry: Any) -> Any:
            count, sums, total, exponents, peak, shrink = carry
            plgpu.barrier_wait(refs["value_full"].at[in_ring(count - 1, sizes.stages, from_zero=not masks)])
            weights = jnp.exp2(exponents)
            sums = add_values(count - 1, masks, sums, shrink, weights)
            return count, sums, peak, summed(total, shrink, weights).sum(axis=1)

        carry = (jnp.int32(0), *self._start(refs, head, first_row))
        overlapped = Overlapped(begin, visit_and_end, end, partial=masks) if self.overlaps(refs) else None
        _, sums, peak, total = self.fold_tiles(refs, place, visit, carry, overlapped)
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        lse = jnp.where(visible, (peak + jnp.log(safe) * LOG2E) * LN2, -jnp.inf)
        sums = sums * along_rows(1.0 / safe, sums.shape)
        if self.splits > 1:  # float32, which shared memory has no place for
            of_part = pl.ds(first_row, ROWS), pl.ds(part * width, width)
            target = refs["output"].at[self.of_split(batch, refs["lse"]), head, *of_part]
            plgpu.store(target, sums, optimized=False)  # type: ignore[attr-defined] # of jax 0.10
        else:  # the query isn't read any more
            output = query
            if "output_tile" in refs:  # where another warpgroup may still read its
                plgpu.barrier_arrive(refs["query_free"])
                plgpu.barrier_wait(refs["query_free"])
                output = refs["output_tile"].at[warpgroup]
            output[...] = sums.astype(query.dtype)
        refs["lse_rows"].at[warpgroup][...] = lse
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["output_full"].at[warpgroup])

    def overlaps(self, refs: dict[str, Any]) -> bool:
        """Whether a tile's exponentials wait for the next one's logits, which takes registers for both."""
        static = self.logits.static_args
        others = (
            static.score is not None or self.logits.soft_cap is not None or not refs.keys().isdisjoint(_IN_REGISTERS)
        )
        arrays = any(name.startswith("leaf") for name in refs) and not all_spans(static, refs, self.sizes.block_kv)
        wide = max(self.dims) > _NARROW and arrays
        return not (others or wide or self.stored or self.in_key) and self.logits.scale > 0

    def masks_overlap(self, refs: dict[str, Any]) -> bool:
        """Whether tiles with a mask overlap too: where there are many, and spans are all that they hide."""
        some = self.overlaps(refs) and self.table.some_partial and self.table.many_partial
        return some and all_spans(self.logits.static_args, refs, self.sizes.block_kv)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See HopperBlock."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        groups = self.consumers // self.column_parts
        query = self.tiles(dtype, groups, ROWS, dim)
        made: dict[str, Any] = {"query_tile": query}
        if value_dim != dim and self.splits == 1:
            output = self.tiles(dtype, self.consumers, ROWS, value_dim // self.column_parts)
            made = {"rows": plgpu.RefUnion(query, output), "query_free": plgpu.Barrier(num_arrivals=self.consumers)}
        for name, columns in zip(self.streams, self.dims, strict=False):
            made[f"{name}_tiles"] = self.tiles(dtype, sizes.stages, sizes.block_kv, columns)
        return made | {
            "columns": plgpu.SMEM((self.consumers, sizes.block_kv), jnp.int32),
            "lse_rows": plgpu.SMEM((self.consumers, ROWS), jnp.float32),
            "query_full": plgpu.Barrier(num_barriers=groups),
            "output_full": plgpu.Barrier(num_barriers=self.consumers),
            **self.barriers(dict.fromkeys(self.streams, 1), self.consumers),
            **self.raw_places(),
        }

    def _start(self, refs: dict[str, Any], head: Any, first_row: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(weighted sums, peak, total) of rows that have seen no key: a sink is a key without a value."""
        sums = zeros(self.dims[1] // self.column_parts)
        if "sinks" not in refs:
            return sums, filled(LOWEST), filled(0.0)
        if self.period is None:
            sinks = filled(refs["sinks"][head])
        else:
            sinks = plgpu.load(refs["sinks"].at[head, pl.ds(first_row, ROWS)], layout=BY_ROW, optimized=False)  # type: ignore[call-arg] # of jax 0.10
        sinks = sinks * LOG2E
        if self.splits > 1:  # seen once
            sinks = sinks + jnp.where(self.split() == 0, 0.0, -jnp.inf)
        return sums, jnp.maximum(sinks, LOWEST), jnp.where(sinks == -jnp.inf, 0.0, 1.0)


def _eights(x: jax.Array) -> list[jax.Array]:
    """The columns of x by eights. Combined they are [rows, 8], for which no thread needs another's numbers."""
    return [x[:, first : first + _EIGHT] for first in range(0, x.shape[1], _EIGHT)]


def _top(x: jax.Array) -> jax.Array:
    """The maximum of columns as [rows, 8]. Of pairs first: the chain is half as long."""
    some = _eights(x)
    pairs = itertools.starmap(jnp.maximum, zip(some[::2], some[1::2], strict=True))
    return functools.reduce(jnp.maximum, pairs)


def _hidden(
    tile: HopperTile, seen: SeenParts, x: jax.Array, work: Callable[[], Any] = lambda: ()
) -> tuple[jax.Array, Any]:
    """(the logits of a tile without those outside of spans, what work() makes beside that)."""
    return seen.where_cut(0, lambda: (tile.within(x, seen.span), work()), lambda: (x, work()))


def _exponentials_and_top(
    early: jax.Array, exponents: jax.Array, x: jax.Array, turn: int
) -> tuple[jax.Array, jax.Array]:
    """(2**exponents, of which `early` has the first columns; `_top` of x), a few columns of each in turn: the compiler keeps that
    order, so that the maximum is computed while exponentials are."""
    made, tops, width, done = [early], list[jax.Array](), x.shape[1], 0
    for first in range(early.shape[1], width, turn):
        made.append(jnp.exp2(exponents[:, first : first + turn]))
        # As many columns of x in each turn, in pairs of eights.
        upto = width * (first + turn - early.shape[1]) // (width - early.shape[1]) // (2 * _EIGHT) * (2 * _EIGHT)
        if upto > done:
            tops.append(_top(x[:, done:upto]))
            done = upto
    return jnp.concatenate(made, axis=1), functools.reduce(jnp.maximum, tops)
