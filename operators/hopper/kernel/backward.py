"""The backward pass: gradients from the weights, which are recomputed from the lse.

One kernel goes by blocks of keys and sums the gradients of key and value over the rows and query heads that see them; one goes by
blocks of rows and sums that of the query. No block adds to what another writes, so results don't depend on the order of blocks.

A factor for each element leads from the gradient of the logits to that of the products. It is applied to the weights, before
other numbers take registers.

Where a warpgroup can't hold the sums of key and value both, one sums those of the keys and another those of the values, for the
same 64 keys: the weights are then computed twice. Where values are the first columns of their keys, these have one gradient, of
which each of two warpgroups sums half of the columns; so it is with the query's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked
from ...flash.kernel.weigh import weigh
from ...kernels.scores import without_padded_rows
from ...mosaic.kernel.block import Copies, along_columns, along_rows, in_ring, part_of
from ...mosaic.kernel.mosaic_sizes import DIM_STEP, Sums
from .block import HopperBlock, zeros
from .hopper_sizes import ROWS, divided, key_warpgroups, latent_halves
from .tensor_cores import tensor_cores
from .tile import BY_COLUMN, BY_ROW, HopperTile

__all__ = ["HopperKeyGradients", "HopperQueryGradient"]

_SUMS_BESIDE_BOTH = 128  # columns of sums beside which a warpgroup holds two products at once; of 32 keys always
_SUMS_BESIDE_OTHERS = 192  # columns of sums beside which the numbers of a mask and of dropout have registers

_ROWS = {"query": "lse", "d_output": "delta"}  # what is loaded by rows, and the numbers of the rows that come with it


class _HopperGradients(HopperBlock):
    """What both kernels do where values are the first columns of their keys, and where registers are few."""

    sums_beside_dropout: ClassVar[int] = _SUMS_BESIDE_OTHERS

    @property
    def most_sums(self) -> int:
        """Columns of the sums of a warpgroup."""
        raise NotImplementedError

    def crowded(self, refs: dict[str, Any], masked: Masked) -> bool:
        """Whether the tiles of a loop have no registers to spare for descriptors that are the same in every turn."""
        beside_mask = masked and self.most_sums > _SUMS_BESIDE_OTHERS
        return self.in_key or beside_mask or ("dropout" in refs and self.most_sums > self.sums_beside_dropout)

    def spans_early(self, refs: dict[str, Any], masked: Masked) -> bool:
        """Whether a tile's spans are computed beside its products, which takes registers; ids that are compared always are."""
        few = self.crowded(refs, masked) or "dropout" in refs
        return masked is Masked.BY_IDS or (masked is Masked.YES and not few)

    def loaded(self, count: Any, turn: Any, masked: Masked) -> Any:
        """The place of the count-th tile that is loaded. A single place is the same in every turn: see `in_loop`."""
        return (
            in_ring(count, self.sizes.stages, from_zero=not masked) if self.sizes.stages > 1 else jnp.minimum(turn, 0)
        )

    def swizzled(self, lines: int) -> int | None:
        """The columns of a tile that are swizzled together: a product goes through as many lines of a tile at once, and of two
        warpgroups with half of the columns each has a number of such steps."""
        return DIM_STEP if self.in_key or lines < ROWS else None


def _meet(barrier: Any) -> None:
    """Wait until all warpgroups that compute are here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@dataclass(frozen=True)
class HopperQueryGradient(_HopperGradients):
    """`block_q` rows of a query head."""

    @property
    def consumers(self) -> int:
        """See HopperBlock."""
        return super().consumers * (2 if self.in_key else 1)

    @property
    def most_sums(self) -> int:
        """See _HopperGradients."""
        return self.dims[0]

    @property
    def apart(self) -> bool:
        """See HopperBlock. With latents each warpgroup has a part of the columns."""
        return self.in_key

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        batch, head, _ = place
        for group, first_row in self._groups(place):
            for name in _ROWS:
                rows = self.rows(refs[name], batch, head, first_row, ROWS)
                plgpu.copy_gmem_to_smem(rows, refs[f"{name}_tile"].at[group], refs["rows_full"].at[group])
        self.load_keys(refs, place)

    def store(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        batch, head, _ = place
        for group, first_row in self._groups(place):
            plgpu.barrier_wait(refs["output_full"].at[group])
            rows = self.rows(refs["d_query"], batch, head, first_row, ROWS)
            plgpu.copy_smem_to_gmem(refs["query_tile"].at[group], rows)
        plgpu.wait_smem_to_gmem(0)

    def _groups(self, place: tuple[Any, Any, Any]) -> list[tuple[int, Any]]:
        """(number, first row) of each 64 rows of a block."""
        return [(group, place[2] * self.sizes.block_q + group * ROWS) for group in range(self.sizes.block_q // ROWS)]

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """See HopperBlock."""
        batch, head, q_block = place
        group, parts = (0, latent_halves(*self.dims)[warpgroup]) if self.in_key else (warpgroup, self._whole)
        first_row = q_block * self.sizes.block_q + group * ROWS
        ready = refs["rows_full"].at[group]
        query, d_output = (refs[f"{name}_tile"].at[group] for name in _ROWS)
        numbers = (refs[name].at[batch, head, pl.ds(first_row, ROWS)] for name in _ROWS.values())
        shift, delta = (plgpu.load(some, layout=BY_ROW, optimized=False) for some in numbers)  # type: ignore[call-arg]
        plgpu.barrier_wait(ready)
        refs = HopperTile.with_numbers(refs, self.logits.static_args.mask, batch, first_row)
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)
        both = self.in_key or self.dims[0] <= _SUMS_BESIDE_BOTH

        def tile_of(kv_block: Any, masked: Masked) -> HopperTile:
            return HopperTile(
                self.logits, refs, (batch, head), first_row, kv_block * sizes.block_kv, sizes, columns,
                by_ids=masked is Masked.BY_IDS,
            )  # fmt: skip

        def visit(kv_block: Any, carry: Any, masked: Masked) -> Any:
            count, sums = carry
            slot, place = in_ring(count, sizes.stages, from_zero=not masked), self.loaded(count, kv_block, masked)
            keys, last = refs["key_tiles"].at[place], self.streams[-1]
            values = self.columns_of("value", refs[f"{last}_tiles"].at[place])
            for name in self.streams:
                plgpu.barrier_wait(refs[f"{name}_full"].at[slot])
            rows = [query, d_output]
            if self.crowded(refs, masked) or self.query_in_loop:
                rows = [self.in_loop(refs[f"{name}_tile"], group, kv_block) for name in _ROWS]
            factors = list(zip(rows, (keys, values), strict=True))
            early = self.spans_early(refs, masked)
            (raw, *d_weights), span = products.logits_beside(
                lambda: tile_of(kv_block, masked).span() if early else None, *factors[: 1 + both]
            )
            if both and not self.in_key:
                plgpu.barrier_arrive(refs["value_free"].at[slot])
            tile = tile_of(kv_block, masked)
            x, factor, pull = weigh(tile, raw, masked)
            x = tile.within(x, span) if masked else x
            shifts = along_rows(shift, x.shape)
            x = without_padded_rows(self.logits.static_args.score, x, shifts)
            weights, keep = jnp.exp2(x * factor - shifts), tile.keep()
            if not both:
                d_weights = list(products.logits(factors[1]))
                if not self.in_key:
                    plgpu.barrier_arrive(refs["value_free"].at[slot])
            d_x = pull(weights) * (tile.dropped(d_weights[0], keep) - along_rows(delta, x.shape))
            pairs = [(d_x.astype(query.dtype), part_of(keys, one)) for one in parts]
            sums = products.add_values(*zip(sums, pairs, strict=True))
            plgpu.barrier_arrive(refs["key_free"].at[slot])
            return count + 1, sums

        carry = (jnp.int32(0), tuple(zeros(one.columns) for one in parts))
        _, sums = self.fold_tiles(refs, place, visit, carry)
        if self.in_key:  # the other warpgroup may still read the query
            _meet(refs["query_free"])
        for gradient, one in zip(sums, parts, strict=True):
            part_of(query, one)[...] = (gradient * self.logits.scale).astype(query.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["output_full"].at[group])

    @property
    def _whole(self) -> tuple[Sums, ...]:
        """All columns in one warpgroup."""
        return (Sums(("query",), 0, self.dims[0]),)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See HopperBlock."""
        sizes, (dim, value_dim), step = self.sizes, self.dims, self.swizzled(self.sizes.block_kv)
        groups = sizes.block_q // ROWS
        made = {
            "query_tile": self.tiles(dtype, groups, ROWS, dim, step=step),
            "d_output_tile": self.tiles(dtype, groups, ROWS, value_dim, step=step),
            "columns": plgpu.SMEM((self.consumers, sizes.block_kv), jnp.int32),
            "rows_full": plgpu.Barrier(num_arrivals=len(_ROWS), num_barriers=groups),
            "output_full": plgpu.Barrier(num_arrivals=self.consumers // groups, num_barriers=groups),
            **self.barriers(dict.fromkeys(self.streams, 1), self.consumers),
        }
        for name, columns in zip(self.streams, self.dims, strict=False):
            made[f"{name}_tiles"] = self.tiles(dtype, sizes.stages, sizes.block_kv, columns, step=step)
        if self.in_key:
            made["query_free"] = plgpu.Barrier(num_arrivals=2)
        return made


@dataclass(frozen=True)
class HopperKeyGradients(_HopperGradients):
    """`block_kv` keys of a kv head. A tile is [keys, rows]: what is multiplied with it lies in the order that wgmma wants."""

    last_first: ClassVar[bool] = False
    sums_beside_dropout: ClassVar[int] = 128  # its numbers wait for a second product

    @property
    def consumers(self) -> int:
        """See HopperBlock."""
        return key_warpgroups(self.sizes, *self.dims, in_key=self.in_key)

    @property
    def divided(self) -> bool:
        """Whether two warpgroups have the same keys."""
        return self.in_key or divided(*self.dims)

    @property
    def most_sums(self) -> int:
        """See _HopperGradients."""
        return max(self.dims) if self.divided else sum(self.dims)

    @property
    def apart(self) -> bool:
        """See HopperBlock. Divided, the warpgroups have different sums."""
        return self.divided

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        batch, block_q = place[0], self.sizes.block_q
        for which, name, rows in self._arrays(refs, place, ""):
            plgpu.copy_gmem_to_smem(rows, refs[f"{name}_tile"].at[which], refs["keys_full"].at[which])

        def copies(at: tuple[Any, Any]) -> dict[str, Copies]:
            head, tile = at
            first = tile * block_q
            some = [(self.rows(refs[name], batch, head, first, block_q), f"{name}_tiles") for name in _ROWS]
            numbers = [(refs[name].at[batch, head, pl.ds(first, block_q)], f"{name}_tiles") for name in _ROWS.values()]
            return {"rows": [*some, *numbers]}

        count = self.fill(refs, place, copies, jnp.int32(0), functools.partial(self.fold_heads, self.each_tile))
        self.drain(refs, count, ("rows",))

    def store(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        for which in range(self.sizes.block_kv // ROWS):
            plgpu.barrier_wait(refs["output_full"].at[which])
        for which, name, rows in self._arrays(refs, place, "d_"):
            plgpu.copy_smem_to_gmem(refs[f"{name}_tile"].at[which], rows)
        plgpu.wait_smem_to_gmem(0)

    def _arrays(self, refs: dict[str, Any], place: tuple[Any, Any, Any], prefix: str) -> list[tuple[int, str, Any]]:
        """(number, 'key' or 'value', rows of its array) of each 64 keys of a block."""
        batch, kv_head, kv_block = place
        return [
            (
                which,
                name,
                self.rows(refs[prefix + name], batch, kv_head, kv_block * self.sizes.block_kv + which * ROWS, ROWS),
            )
            for which in range(self.sizes.block_kv // ROWS)
            for name in self.streams
        ]

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """See HopperBlock."""
        if self.in_key:
            self._sum(refs, place, warpgroup, 0, latent_halves(*self.dims)[warpgroup])
            return
        whole = tuple(Sums((name,), 0, columns) for name, columns in zip(("key", "value"), self.dims, strict=True))
        parts = whole[warpgroup : warpgroup + 1] if self.divided else whole
        self._sum(refs, place, warpgroup, 0 if self.divided else warpgroup, parts)

    def _sum(
        self,
        refs: dict[str, Any],
        place: tuple[Any, Any, Any],
        warpgroup: int,
        which: int,
        parts: tuple[Sums, ...],
    ) -> None:
        """These sums of the `which`-th 64 keys."""
        batch, _, kv_block = place
        first_key = kv_block * self.sizes.block_kv + which * ROWS
        held = {name: refs[f"{name}_tile"].at[which] for name in self.streams}
        plgpu.barrier_wait(refs["keys_full"].at[which])
        refs = HopperTile.with_numbers(refs, self.logits.static_args.mask, batch, first_key)
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)
        dtype, summed = held["key"].dtype, {name for one in parts for name in one.of}
        by_pair = _by_pair(refs) and self.most_sums > _SUMS_BESIDE_BOTH

        def tile_of(at: tuple[Any, Any], masked: Masked) -> HopperTile:
            head, q_block = at
            return HopperTile(
                self.logits, refs, (batch, head), q_block * sizes.block_q, first_key, sizes, columns, by_keys=True,
                by_ids=masked is Masked.BY_IDS,
            )  # fmt: skip

        def visit(at: tuple[Any, Any], carry: Any, masked: Masked) -> Any:
            q_block = at[1]
            count, sums = carry
            slot = in_ring(count, sizes.stages, from_zero=not masked)
            queries, d_outputs = (refs[f"{name}_tiles"].at[slot] for name in _ROWS)
            plgpu.barrier_wait(refs["rows_full"].at[slot])
            few = by_pair or self.crowded(refs, masked)
            tiles = {name: self.in_loop(refs[f"{name}_tile"], which, q_block) for name in self.streams} if few else held
            factors = [(tiles["key"], queries), (self.columns_of("value", tiles[self.streams[-1]]), d_outputs)]
            # Dropout's random numbers take the registers that the gradients of weights would.
            both = "key" in summed and "dropout" not in refs
            early = self.spans_early(refs, masked)
            (raw, *d_weights), span = products.logits_beside(
                lambda: tile_of(at, masked).span() if early else None, *factors[: 2 if both else 1]
            )
            tile = tile_of(at, masked)
            x, factor, pull = weigh(tile, raw, masked)
            x = tile.within(x, span) if masked else x
            shifts = along_columns(products.numbers(refs["lse_tiles"].at[slot], BY_COLUMN), x.shape)
            x = without_padded_rows(self.logits.static_args.score, x, shifts)
            weights, keep = jnp.exp2(x * factor - shifts), tile.keep()
            if keep is not None and "key" in summed and not self.in_key:
                # Until the products are there, the signs of the weights.
                signed = jnp.where(keep, weights, -weights)
                weights, keep = jnp.abs(signed), signed > 0
            if "key" in summed and not both:
                d_weights = list(products.logits(factors[1]))
            terms = {"value": (tile.dropped(weights, keep).astype(dtype), d_outputs)}
            if d_weights:
                delta = products.numbers(refs["delta_tiles"].at[slot], BY_COLUMN)
                d_kept = tile.dropped(d_weights[0], keep)
                d_x = pull(weights) * (d_kept - along_columns(delta, x.shape))
                # In one sum with the values', which have no such factor.
                terms["key"] = ((d_x * self.logits.scale if self.in_key else d_x).astype(dtype), queries)
            added = [[(terms[name][0], part_of(terms[name][1], one)) for name in one.of] for one in parts]
            sums = products.add_values(*((total, *pairs) for total, pairs in zip(sums, added, strict=True)))
            plgpu.barrier_arrive(refs["rows_free"].at[slot])
            return count + 1, sums

        sums = tuple(zeros(one.columns) for one in parts)
        _, sums = self.fold_heads(self.fold_tiles, refs, place, visit, (jnp.int32(0), sums))
        if self.divided:  # the other warpgroup may still read what is written here
            _meet(refs["keys_free"])
        for gradient, one in zip(sums, parts, strict=True):
            scaled = one.of == ("key",) and not self.in_key
            part_of(held[one.of[0]], one)[...] = (gradient * self.logits.scale if scaled else gradient).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["output_full"].at[which])

    def fold_heads(self, fold: Any, refs: dict[str, Any], place: tuple[Any, Any, Any], visit: Any, carry: Any) -> Any:
        """visit((query head, tile), carry, ...) for the tiles of a kv head's query heads, as `fold` visits those of one. Where
        these have one table, a tile is visited for each in turn: a loop over heads around the one over tiles takes registers,
        which are few beside the sums of key and value."""
        batch, kv_head, kv_block = place

        def of_head(number: Any, carry: Any) -> Any:
            head = kv_head * self.group + number
            row = batch, head, kv_block
            return fold(refs, row, lambda tile, *rest: visit((head, tile), *rest), carry)

        def of_all(at: tuple[Any, Any], *rest: Any) -> Any:
            tile, number = at
            return visit((kv_head * self.group + number, tile), *rest)

        if self.group == 1:
            return of_head(0, carry)
        if (self.divided and not self.in_key) or _by_pair(refs) or self.table.table.shape[1] > 1:
            return lax.fori_loop(0, self.group, of_head, carry)
        return fold(refs, (batch, 0, kv_block), of_all, carry, times=self.group)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See HopperBlock."""
        sizes, (dim, value_dim), step = self.sizes, self.dims, self.swizzled(self.sizes.block_q)
        parts = sizes.block_kv // ROWS
        made = {
            **{
                f"{name}_tile": self.tiles(dtype, parts, ROWS, columns, step=step)
                for name, columns in zip(self.streams, self.dims, strict=False)
            },
            "query_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, dim, step=step),
            "d_output_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, value_dim, step=step),
            **{f"{name}_tiles": plgpu.SMEM((sizes.stages, sizes.block_q), jnp.float32) for name in _ROWS.values()},
            "columns": plgpu.SMEM((self.consumers, sizes.block_q), jnp.int32),
            "keys_full": plgpu.Barrier(num_arrivals=len(self.streams), num_barriers=parts),
            "output_full": plgpu.Barrier(num_arrivals=self.consumers // parts, num_barriers=parts),
            **self.barriers({"rows": 2 * len(_ROWS)}, self.consumers),
        }
        if self.divided:
            made["keys_free"] = plgpu.Barrier(num_arrivals=2)
        return made


def _by_pair(refs: dict[str, Any]) -> bool:
    """Whether a bias or a score has a number for each pair of a row and a key, which is loaded into registers: of an array by
    both, or of a table, which has neither."""
    arrays = [ref for name, ref in refs.items() if name == "bias" or name.startswith("capture")]
    return any(1 not in ref.shape[2:] for ref in arrays)
