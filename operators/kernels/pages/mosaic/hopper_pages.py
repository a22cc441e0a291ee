"""The kernel over pages on Hopper: one warpgroup loads and cleans, the others compute with wgmma, their sums in registers. Of
quantised pages two load, keys and values, and widen what has come.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....flash.kernel.weigh import weigh
from ....hopper.kernel.hopper_sizes import ROWS
from ....hopper.kernel.tensor_cores import tensor_cores
from ....hopper.kernel.tile import TILE
from ....mosaic.kernel.block import WARPGROUPS, along_rows, in_ring
from ...lse import LN2, LOG2E
from .page_block import Unit, Work
from .page_sizes import HOPPER_SIZING
from .page_tiles import PageSizing
from .page_widening import WideningBlock

__all__ = ["HopperPages"]

# Registers per thread of a warpgroup that loads and of one that computes, by how many there are of each: what some give up is all
# that others can take. With one of each they stay as compiled. One that widens quantised numbers needs more.
_REGISTERS = {(1, 2): (56, 224), (2, 1): (120, 240), (2, 2): (56, 200)}
_REGISTERS_OF_LATENTS = (56, 224)  # quantised ones
_REGISTERS_OF_PARTS = (40, 232)  # where two that compute have half of a row's columns each


@dataclass(frozen=True)
class HopperPages(WideningBlock):
    """`block_q` rows, 64 of each group of them."""

    in_registers: ClassVar[Any] = TILE
    sizing: ClassVar[PageSizing] = HOPPER_SIZING

    def __call__(self, refs: dict[str, Any]) -> None:
        warpgroup, work = lax.axis_index(WARPGROUPS), self.work(refs)
        registers = _REGISTERS.get((self.loaders, self.sizes.consumers))
        if self.sizes.parts > 1 and not self.quantised:
            registers = _REGISTERS_OF_PARTS
        if self.quantised and self.in_key:
            registers = _REGISTERS_OF_LATENTS if self.sizes.consumers > 1 else None

        @pl.when(warpgroup < self.sizes.consumers)
        def _compute() -> None:
            if registers is not None:
                plgpu.set_max_registers(registers[1], action="increase")
            self.used(work, lambda: self._compute(refs, work, warpgroup))

        for loader, names in enumerate(self.wideners or (self.streams,)):

            @pl.when(warpgroup == self.sizes.consumers + loader)
            def _load(names: tuple[str, ...] = names) -> None:
                if registers is not None:
                    plgpu.set_max_registers(registers[0], action="decrease")
                load = functools.partial(self.widen_tiles, names=names) if self.quantised else self.load
                self.used(work, lambda: load(refs, work))

    @property
    def loaders(self) -> int:
        """Warpgroups that load."""
        return len(self.wideners) or 1

    @property
    def warpgroups(self) -> int:
        """See BlockOfThreads."""
        return self.sizes.consumers + self.loaders

    # -- the warpgroup that loads ------------------------------------------------------------------------------------

    def loaded(self, name: str, masked: bool) -> str:
        """See PagesBlock. Values are there once they are clean."""
        return f"{name}_{'raw' if masked and name == self.streams[-1] else 'full'}"

    def after_load(self, refs: dict[str, Any], unit: Unit, tile: Any, slot: Any) -> None:
        """Clean values, once they have come."""
        name = self.streams[-1]
        plgpu.barrier_wait(refs[f"{name}_raw"].at[slot])
        self.zero_hidden(refs, unit, tile, slot)
        plgpu.barrier_arrive(refs[f"{name}_clean"].at[slot])

    # -- those that compute ------------------------------------------------------------------------------------------

    def _compute(self, refs: dict[str, Any], work: Work, warpgroup: Any) -> None:
        """Online softmax over the tiles."""
        unit, stages, parts = work.unit, self.sizes.stages, self.sizes.parts
        group, part = self._place(warpgroup)
        query, columns = refs["query_tile"].at[group], self.dims[1] // parts
        rows = pl.ds(group * ROWS, ROWS)
        limits, keys_of_tile = self.limits(refs, unit, rows), (0, self.sizes.block_kv)
        numbers = self.score_rows(refs, work, rows)
        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), TILE),
            *self.start(refs, work, group),
        )
        plgpu.barrier_wait(refs["query_full"].at[group])
        products, last = tensor_cores(self.interpret), self.streams[-1]
        kv_head = self.kv_head(work)

        def visit(turn: Any, carry: Any, masked: bool) -> Any:
            sums, peak, total = carry
            tile = unit.tile(turn, masked)
            # With one place the compiler would keep the addresses of all its parts, unless it seems to differ from turn to turn.
            slot = in_ring(turn, stages) if stages > 1 else jnp.minimum(tile, 0)
            keys = refs["key_tiles"].at[slot]
            cleaned = masked and not self.quantised
            plgpu.barrier_wait(refs["key_clean" if cleaned and self.in_key else "key_full"].at[slot])
            (raw,) = products.logits((query, keys))
            of_keys = self.factors(refs, "key", slot, keys_of_tile)
            if not self.in_key:
                plgpu.barrier_arrive(refs["key_free"].at[slot])
            seen = [] if not masked else self.visible(refs, unit, tile, rows, limits, keys_of_tile)
            if of_keys is None and "key_scale" in refs:
                of_keys = refs["key_scale"][kv_head]
            x, factor, _ = weigh(self.part(refs, work, tile, seen, keys_of_tile, numbers, of_keys), raw, masked)
            new_peak = jnp.maximum(peak, x.max(axis=1) * factor)
            shift = self.finite_peak(new_peak) if masked else new_peak
            shrink = jnp.exp2(peak - shift)
            weights = jnp.exp2(x * factor - along_rows(shift, x.shape))
            total = total * shrink + weights.sum(axis=1)
            sums = sums * along_rows(shrink, sums.shape)
            if not self.in_key:
                plgpu.barrier_wait(refs["value_clean" if cleaned else "value_full"].at[slot])
            of_values = of_keys if self.in_key else self.factors(refs, "value", slot, keys_of_tile)
            if f"{last}_scales" in refs and of_values is not None:  # one that no row sees may be NaN
                weights = weights * of_values
                weights = jnp.where(seen[0], weights, 0.0) if masked else weights
            values = refs[f"{last}_tiles"].at[slot]
            if self.dims[1] != values.shape[1] or parts > 1:
                values = values.at[:, pl.ds(part * columns, columns)]
            (sums,) = products.add_values((sums, (weights.astype(query.dtype), values)))
            plgpu.barrier_arrive(refs[f"{last}_free"].at[slot])
            return sums, new_peak, total

        self._finish(refs, work, warpgroup, self.visit(unit, visit, carry))

    def _place(self, warpgroup: Any) -> tuple[Any, Any]:
        """(group of rows, part of the columns) of a warpgroup; numbers where there is one, so that addresses are known."""
        groups, parts = self.sizes.row_groups, self.sizes.parts
        group = 0 if groups == 1 else warpgroup if parts == 1 else lax.div(warpgroup, jnp.int32(parts))
        return group, 0 if parts == 1 else warpgroup if groups == 1 else lax.rem(warpgroup, jnp.int32(parts))

    def _finish(self, refs: dict[str, Any], work: Work, warpgroup: Any, carry: Any) -> None:
        """Write the rows' output and lse."""
        sums, peak, total = carry
        group, part = self._place(warpgroup)
        columns = sums.shape[1]
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        lse = jnp.where(visible, (peak + jnp.log(safe) * LOG2E) * LN2, -jnp.inf)
        if self.sizes.parts > 1:  # the others may still read the queries, whose place it takes
            plgpu.barrier_arrive(refs["query_free"])
            plgpu.barrier_wait(refs["query_free"])
        output = refs["output_tile" if "output_tile" in refs else "query_tile"].at[warpgroup]
        share = 1.0 / safe
        if "value_scale" in refs:
            share = share * refs["value_scale"][self.kv_head(work)]
        output[...] = (sums * along_rows(share, sums.shape)).astype(refs["output"].dtype)
        rows, lse_rows = pl.ds(group * ROWS, self.rows), refs["lse_rows"].at[warpgroup]
        lse_rows[...] = lse
        plgpu.commit_smem()
        target = refs["output"].at[work.number, work.head, rows, pl.ds(part * columns, columns)]
        plgpu.copy_smem_to_gmem(output.at[pl.ds(0, self.rows)], target)

        @pl.when(part == 0)
        def _write_lse() -> None:
            plgpu.copy_smem_to_gmem(lse_rows.at[pl.ds(0, self.rows)], refs["lse"].at[work.number, work.head, rows])

        plgpu.wait_smem_to_gmem(0)

    # -- places and barriers -----------------------------------------------------------------------------------------

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See BlockOfThreads."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        query = self.tiles(dtype, sizes.row_groups, ROWS, dim)
        output = self.tiles(dtype, sizes.consumers, ROWS, value_dim // sizes.parts)
        made: dict[str, Any] = {"query_tile": query}
        if dim != value_dim or sizes.parts > 1:
            alone = sizes.row_groups == 1
            made = (
                {"query_tile output_tile": plgpu.RefUnion(query, output)} if alone else made | {"output_tile": output}
            )
        made |= {
            "lse_rows": plgpu.SMEM((sizes.consumers, ROWS), jnp.float32),
            "query_full": plgpu.Barrier(num_barriers=sizes.row_groups),
            "query_free": plgpu.Barrier(num_arrivals=sizes.parts),
            **self.barriers(dict.fromkeys(self.streams, 1 if self.quantised else self.copies), sizes.consumers),
        }
        for stream, columns in zip(self.streams, self.dims, strict=False):
            made[f"{stream}_tiles"] = self.tiles(dtype, sizes.stages, sizes.block_kv, columns, step=self.step(stream))
        made |= self.widening_places() | self.own_places(dtype)
        if not self.quantised:
            last = self.streams[-1]
            made[f"{last}_raw"] = plgpu.Barrier(num_arrivals=self.copies, num_barriers=sizes.stages)
            made[f"{last}_clean"] = plgpu.Barrier(num_barriers=sizes.stages)
        return made
