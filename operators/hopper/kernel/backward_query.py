"""The gradient of the query: see `backward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked
from ...flash.kernel.weigh import weigh
from ...mosaic.kernel.block import along_rows, in_ring, part_of
from ...mosaic.kernel.mosaic_sizes import Sums
from .backward import BY_ROWS, SUMS_BESIDE_BOTH, HopperGradients, meet
from .block import zeros
from .hopper_sizes import ROWS, latent_halves
from .tensor_cores import tensor_cores
from .tile import BY_ROW, HopperTile

__all__ = ["HopperQueryGradient"]


@dataclass(frozen=True)
class HopperQueryGradient(HopperGradients):
    """`block_q` rows of a query head."""

    @property
    def consumers(self) -> int:
        """See HopperBlock."""
        return super().consumers * (2 if self.in_key else 1)

    @property
    def most_sums(self) -> int:
        """See HopperGradients."""
        return self.dims[0]

    @property
    def apart(self) -> bool:
        """See HopperBlock. With latents each warpgroup has a part of the columns."""
        return self.in_key

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        batch, head, _ = place
        for group, first_row in self._groups(place):
            for name in BY_ROWS:
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
        query = refs["query_tile"].at[group]
        numbers = (refs[name].at[batch, head, pl.ds(first_row, ROWS)] for name in BY_ROWS.values())
        shift, delta = (plgpu.load(some, layout=BY_ROW, optimized=False) for some in numbers)  # type: ignore[call-arg]
        plgpu.barrier_wait(ready)
        refs = HopperTile.with_numbers(refs, self.logits.static_args.mask, batch, first_row)
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)
        both = self.in_key or self.dims[0] <= SUMS_BESIDE_BOTH

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
            factors = list(zip(self.held(refs, tuple(BY_ROWS), group, kv_block, masked), (keys, values), strict=True))
            early = self.spans_early(refs, masked)
            (raw, *d_weights), span = products.logits_beside(
                lambda: tile_of(kv_block, masked).span() if early else None, *factors[: 1 + both]
            )
            if both and not self.in_key:
                plgpu.barrier_arrive(refs["value_free"].at[slot])
            tile = tile_of(kv_block, masked)
            x, factor, pull = weigh(tile, raw, masked)
            weights = self.weights(tile, x, factor, along_rows(shift, x.shape), masked, span)
            keep = tile.keep()
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
            meet(refs["query_free"])
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
            "rows_full": plgpu.Barrier(num_arrivals=len(BY_ROWS), num_barriers=groups),
            "output_full": plgpu.Barrier(num_arrivals=self.consumers // groups, num_barriers=groups),
            **self.barriers(dict.fromkeys(self.streams, 1), self.consumers),
        }
        for name, columns in zip(self.streams, self.dims, strict=False):
            made[f"{name}_tiles"] = self.tiles(dtype, sizes.stages, sizes.block_kv, columns, step=step)
        if self.in_key:
            made["query_free"] = plgpu.Barrier(num_arrivals=2)
        return made
