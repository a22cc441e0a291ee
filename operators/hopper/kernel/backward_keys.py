"""The gradients of key and value: see `backward`."""

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
from ...mosaic.kernel.block import Copies, along_columns, in_ring, part_of
from ...mosaic.kernel.mosaic_sizes import Sums
from .backward import BY_ROWS, SUMS_BESIDE_BOTH, HopperGradients, meet
from .block import zeros
from .hopper_sizes import ROWS, divided, key_warpgroups, latent_halves
from .tensor_cores import tensor_cores
from .tile import BY_COLUMN, HopperTile

__all__ = ["HopperKeyGradients"]


@dataclass(frozen=True)
class HopperKeyGradients(HopperGradients):
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
        """See HopperGradients."""
        return max(self.dims) if self.divided else sum(self.dims)

    def crowded(self, refs: dict[str, Any], masked: Masked) -> bool:
        """See HopperGradients."""
        few = (self.divided and self.many_sums(masked)) or (_by_pair(refs) and self.most_sums > SUMS_BESIDE_BOTH)
        return few or super().crowded(refs, masked)

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
            some = [(self.rows(refs[name], batch, head, first, block_q), f"{name}_tiles") for name in BY_ROWS]
            numbers = [
                (refs[name].at[batch, head, pl.ds(first, block_q)], f"{name}_tiles") for name in BY_ROWS.values()
            ]
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
        plgpu.barrier_wait(refs["keys_full"].at[which])
        refs = HopperTile.with_numbers(refs, self.logits.static_args.mask, batch, first_key)
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)
        dtype, summed = refs["key_tile"].dtype, {name for one in parts for name in one.of}

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
            queries, d_outputs = (refs[f"{name}_tiles"].at[slot] for name in BY_ROWS)
            plgpu.barrier_wait(refs["rows_full"].at[slot])
            keys, *values = self.held(refs, self.streams, which, q_block, masked)
            factors = [(keys, queries), (self.columns_of("value", (values or [keys])[0]), d_outputs)]
            # Dropout's random numbers take the registers that the gradients of weights would.
            both = "key" in summed and "dropout" not in refs
            early = self.spans_early(refs, masked)
            (raw, *d_weights), span = products.logits_beside(
                lambda: tile_of(at, masked).span() if early else None, *factors[: 2 if both else 1]
            )
            tile = tile_of(at, masked)
            x, factor, pull = weigh(tile, raw, masked)
            shifts = along_columns(products.numbers(refs["lse_tiles"].at[slot], BY_COLUMN), x.shape)
            weights, keep = self.weights(tile, x, factor, shifts, masked, span), tile.keep()
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
        count, sums = self.fold_heads(self.fold_tiles, refs, place, visit, (jnp.int32(0), sums))
        # Their places are computed here: kept for the whole loop, they would take registers.
        held = {name: self.in_loop(refs[f"{name}_tile"], which, count) for name in self.streams}
        if self.divided:  # the other warpgroup may still read what is written here
            meet(refs["keys_free"])
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
            **{f"{name}_tiles": plgpu.SMEM((sizes.stages, sizes.block_q), jnp.float32) for name in BY_ROWS.values()},
            "columns": plgpu.SMEM((self.consumers, sizes.block_q), jnp.int32),
            "keys_full": plgpu.Barrier(num_arrivals=len(self.streams), num_barriers=parts),
            "output_full": plgpu.Barrier(num_arrivals=self.consumers // parts, num_barriers=parts),
            **self.barriers({"rows": 2 * len(BY_ROWS)}, self.consumers),
        }
        if self.divided:
            made["keys_free"] = plgpu.Barrier(num_arrivals=2)
        return made


def _by_pair(refs: dict[str, Any]) -> bool:
    """Whether a bias or a score has a number for each pair of a row and a key, which is loaded into registers: of an array by
    both, or of a table, which has neither."""
    arrays = [ref for name, ref in refs.items() if name == "bias" or name.startswith("capture")]
    return any(1 not in ref.shape[2:] for ref in arrays)
