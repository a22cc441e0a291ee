"""The kernel over pages on Blackwell: the roles of the kernel over dense arrays, with logits and sums in tensor memory. The
warpgroup that corrects sums also writes zeros over values that nobody may see; of quantised pages those that widen them do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....blackwell.kernel.blackwell_sizes import PART, ROWS
from ....blackwell.kernel.roles import BlackwellRoles
from ....blackwell.kernel.tile import TILE
from ....mosaic.kernel.block import in_ring
from .page_block import Work
from .page_sizes import BLACKWELL_SIZING
from .page_tile import PageTile
from .page_tiles import PageSizing
from .page_widening import WideningBlock

__all__ = ["BlackwellPages"]

_ROWS_OF_ZEROS = 64  # keys over whose values zeros are written at once
# Registers per thread of the roles, by the number of warpgroups for softmaxes.
_ZEROING = {1: (240, 200, 64), 2: (200, 88, 24)}
# The same with those of warpgroups that widen, by how many of these there are.
_WIDENING = {1: (224, 96, 40, 152), 2: (184, 88, 40, 80)}


@dataclass(frozen=True)
class BlackwellPages(WideningBlock, BlackwellRoles):
    """`block_q` rows, 128 of each group of them."""

    in_registers: ClassVar[Any] = TILE
    sizing: ClassVar[PageSizing] = BLACKWELL_SIZING

    @property
    def registers(self) -> tuple[int, ...]:
        """See BlackwellRoles. Zeros over the values of many keys take more registers."""
        if self.quantised:
            return _WIDENING[len(self.wideners)]
        many = self.groups > 1 or self.sizes.block_kv > _ROWS_OF_ZEROS
        return _ZEROING[self.groups] if many else super().registers

    @property
    def held(self) -> int:
        """See BlackwellRoles."""
        return self.sizes.held

    @property
    def across_warps(self) -> int:
        """See BlockOfThreads. A thread has a whole row; where shared memory is full, nothing is left over."""
        return 0 if self.held else super().across_warps

    @property
    def apart(self) -> bool:
        """See BlackwellRoles. Queries have the place of weights."""
        return not self.held and super().apart

    def __call__(self, refs: dict[str, Any]) -> None:
        """The roles."""
        if self.held:
            counts = {"shrink": self.places, "totals": 1, "lse_rows": 1}
            begin = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
            rows = refs["row_numbers"]
            refs = refs | {name: rows.at[pl.ds(begin[name], number)] for name, number in counts.items()}
        super().__call__(refs)

    def wait_for_queries(self, refs: dict[str, Any], group: int) -> None:
        """See BlackwellRoles."""
        super().wait_for_queries(refs, group)
        if self.held:
            plgpu.barrier_wait(refs["query_held"].at[group])

    @property
    def columns(self) -> int:
        """See BlackwellRoles."""
        return self.dims[1] // self.sizes.column_blocks

    def part_of_columns(self, run: Callable[[int], None]) -> None:
        """See BlackwellRoles."""
        for number in range(self.sizes.column_blocks):
            pl.when(self.columns_block() == number)(functools.partial(run, number))

    def load(self, refs: dict[str, Any], work: Work) -> None:
        """See BlackwellRoles. Who widens quantised pages loads them."""
        if not self.quantised:
            super().load(refs, work)

    def count(self, refs: dict[str, Any], work: Work) -> Any:
        """See BlackwellRoles."""
        del refs
        return work.unit.tiles

    def visit_tiles(self, refs: dict[str, Any], work: Work, visit: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
        """See BlackwellRoles."""
        del refs
        unit = work.unit
        return self.visit(unit, lambda number, carry, masked: visit(unit.tile(number, masked), carry, masked), carry)

    def of_rows(self, refs: dict[str, Any], work: Work, group: Any) -> dict[str, Any]:
        """See BlackwellRoles. First it takes its queries to tensor memory."""
        rows = pl.ds(group * ROWS, ROWS)
        if self.held:
            for first in range(0, self.held, PART):
                columns = pl.ds(first, PART)
                query = refs["query"].at[work.unit.tile_of_rows, work.head, rows, columns]
                query = plgpu.load(query, layout=TILE, optimized=False)  # type: ignore[call-arg] # of jax 0.10
                plgpu.async_store_tmem(self.held_at(refs, group, first, PART), query)
            plgpu.commit_tmem()
            plgpu.barrier_arrive(refs["query_held"].at[group])
        return self.score_rows(refs, work, rows)

    def parts(
        self,
        refs: dict[str, Any],
        work: Work,
        group: Any,
        tile: Any,
        count: Any,
        masked: bool,
        of_rows: dict[str, Any],
    ) -> list[PageTile]:
        """See BlackwellRoles."""
        slot, last = in_ring(count, self.sizes.stages), self.streams[-1]
        if "value" in self.scaled:
            plgpu.barrier_wait(refs["value_full"].at[slot])
        of_head = refs["key_scale"][self.kv_head(work)] if "key_scale" in refs else None
        parts = [(first, PART) for first in range(0, self.sizes.block_kv, PART)]
        seen: list[list[Any]] = [[] for _ in parts]
        if masked:
            rows = pl.ds(group * ROWS, ROWS)
            limits = self.limits(refs, work.unit, rows)
            seen = [self.visible(refs, work.unit, tile, rows, limits, keys) for keys in parts]
        made = []
        for some, keys in zip(seen, parts, strict=True):
            scale = self.factors(refs, "key", slot, keys) if "key" in self.scaled else of_head
            of_values = functools.partial(self.factors, refs, last, slot, keys)
            made.append(self.part(refs, work, tile, some, keys, of_rows, scale, of_values))
        return made

    def shift(self, peak: jax.Array, masked: Any) -> jax.Array:
        """See BlackwellRoles and PagesBlock."""
        return self.finite_peak(peak) if masked or self.logits.static_args.score is not None else peak

    def weighed(self, refs: dict[str, Any], count: Any) -> None:
        """See BlackwellRoles. Scales of tokens have been read."""
        for name in self.scaled:
            plgpu.barrier_arrive(refs[f"{name}_free"].at[in_ring(count, self.sizes.stages)])

    def shares(self, refs: dict[str, Any], work: Work, share: jax.Array) -> jax.Array:
        """See BlackwellRoles."""
        return share * refs["value_scale"][self.kv_head(work)] if "value_scale" in refs else share

    def turns(self, work: Work, count: Any) -> tuple[tuple[Any, Any, bool], ...]:
        """See BlackwellRoles."""
        return ((1, work.unit.whole, False), (jnp.maximum(work.unit.whole, 1), count, True))

    def clean(self, refs: dict[str, Any], work: Work, number: Any, masked: bool | None) -> None:
        """See BlackwellRoles. The logits of the tile are there, so that nobody reads keys that are values."""
        if self.quantised:
            return
        slot = in_ring(number, self.sizes.stages)
        if not self.in_key:
            plgpu.barrier_wait(refs["value_full"].at[slot])
        if masked is not False:
            tile = work.unit.tile(number, masked)
            some = jnp.bool_(True) if masked else number >= work.unit.whole
            pl.when(some)(lambda: self.zero_hidden(refs, work.unit, tile, slot))

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See BlockOfThreads."""
        made = super().scratch(dtype) | self.widening_places() | self.own_places(dtype)
        for name in (
            self.streams if self.quantised else ()
        ):  # who widens a tile says so once; its scales are read by softmaxes
            readers, stages = 1 + self.groups * (name in self.scaled), self.sizes.stages
            made[f"{name}_full"] = plgpu.Barrier(num_barriers=stages)
            made[f"{name}_free"] = plgpu.Barrier(num_arrivals=readers, num_barriers=stages, orders_tensor_core=True)
        if self.held:
            for name in ("shrink", "totals", "lse_rows"):
                del made[name]
            made["row_numbers"] = plgpu.SMEM((self.places + 2, ROWS), jnp.float32)
            made["query_held"] = plgpu.Barrier(num_barriers=self.groups, orders_tensor_core=True)
            made["held_columns"] = plgpu.TMEM((ROWS, self.groups * self.held), dtype, packed=True)
        return made

    def store(self, refs: dict[str, Any], work: Work, group: Any, name: str, held: Any) -> None:
        """See BlackwellRoles."""
        target = refs[name].at[work.number, work.head, pl.ds(group * ROWS, self.rows)]
        columns, several = self.columns, self.sizes.column_blocks > 1
        if several and name == "output":
            target = target.at[:, pl.ds(work.part * columns, columns)]

        @pl.when(jnp.bool_(True) if not several or name == "output" else work.part == 0)
        def _copy() -> None:
            plgpu.copy_smem_to_gmem(held.at[pl.ds(0, self.rows)], target)
