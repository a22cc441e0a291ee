"""The kernel over pages on Blackwell: the roles of the kernel over dense arrays, with logits and sums in tensor memory. The
warpgroup that corrects sums also writes zeros over values that nobody may see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....blackwell.kernel.blackwell_sizes import PART, ROWS
from ....blackwell.kernel.forward import BlackwellRoles
from ....blackwell.kernel.tile import TILE
from .page_block import PagesBlock, Work
from .page_sizes import BLACKWELL_SIZING
from .page_tile import PageTile
from .page_tiles import PageSizing

__all__ = ["BlackwellPages"]

_ROWS_OF_ZEROS = 64  # keys over whose values zeros are written at once


@dataclass(frozen=True)
class BlackwellPages(PagesBlock, BlackwellRoles):
    """`block_q` rows, 128 of each group of them."""

    in_registers: ClassVar[Any] = TILE
    sizing: ClassVar[PageSizing] = BLACKWELL_SIZING

    @property
    def registers(self) -> tuple[int, ...]:
        """See BlackwellRoles. Zeros over the values of many keys take more registers."""
        many = self.groups == 1 and self.sizes.block_kv > _ROWS_OF_ZEROS
        return (240, 200, 64) if many else super().registers

    def count(self, refs: dict[str, Any], work: Work) -> Any:
        """See BlackwellRoles."""
        del refs
        return work.unit.tiles

    def visit_tiles(self, refs: dict[str, Any], work: Work, visit: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
        """See BlackwellRoles."""
        del refs
        unit = work.unit
        return self.visit(unit, lambda number, carry, masked: visit(unit.tile(number, masked), carry, masked), carry)

    def of_rows(self, refs: dict[str, Any], work: Work, group: int) -> dict[str, Any]:
        """See BlackwellRoles."""
        return self.score_rows(refs, work, pl.ds(group * ROWS, ROWS))

    def parts(
        self, refs: dict[str, Any], work: Work, group: int, tile: Any, masked: bool, of_rows: dict[str, Any]
    ) -> list[PageTile]:
        """See BlackwellRoles."""
        parts = [(first, PART) for first in range(0, self.sizes.block_kv, PART)]
        seen: list[list[Any]] = [[] for _ in parts]
        if masked:
            rows = pl.ds(group * ROWS, ROWS)
            limits = self.limits(refs, work.unit, rows)
            seen = [self.visible(refs, work.unit, tile, rows, limits, keys) for keys in parts]
        return [self.part(refs, work, tile, *some, of_rows) for some in zip(seen, parts, strict=True)]

    def turns(self, work: Work, count: Any) -> tuple[tuple[Any, Any, bool], ...]:
        """See BlackwellRoles."""
        return ((1, work.unit.whole, False), (jnp.maximum(work.unit.whole, 1), count, True))

    def clean(self, refs: dict[str, Any], work: Work, number: Any, masked: bool | None) -> None:
        """See BlackwellRoles. The logits of the tile are there, so that nobody reads keys that are values."""
        slot = lax.rem(number, jnp.int32(self.sizes.stages))
        if not self.in_key:
            plgpu.barrier_wait(refs["value_full"].at[slot])
        if masked is not False:
            tile = work.unit.tile(number, masked)
            some = jnp.bool_(True) if masked else number >= work.unit.whole
            pl.when(some)(lambda: self.zero_hidden(refs, work.unit, tile, slot))

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See BlockOfThreads."""
        return super().scratch(dtype) | self.own_places(dtype)

    def store(self, refs: dict[str, Any], work: Work, group: int, name: str, held: Any) -> None:
        """See BlackwellRoles."""
        target = refs[name].at[work.number, work.head, pl.ds(group * ROWS, self.rows)]
        plgpu.copy_smem_to_gmem(held.at[pl.ds(0, self.rows)], target)
