"""Quantised pages: warpgroups that load their tiles and widen the numbers for the products, of keys and of values each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....mosaic.kernel.block import in_ring
from ....mosaic.kernel.widen import ROWS, WIDENED, widen_part
from .page_block import PagesBlock, Unit, Work

__all__ = ["WideningBlock"]

_AT_ONCE = 128  # columns up to which numbers are widened without a loop: more would take registers that aren't there


@dataclass(frozen=True)
class WideningBlock(PagesBlock):
    """A block over pages that may be quantised."""

    @property
    def quantised(self) -> bool:
        """Whether pages hold numbers of 8 bits, which warpgroups of their own widen."""
        return self.stored is not None

    @property
    def wideners(self) -> tuple[tuple[str, ...], ...]:
        """What each of the warpgroups loads and widens."""
        return tuple((name,) for name in self.streams) if self.quantised else ()

    def widen_tiles(self, refs: dict[str, Any], work: Work, names: tuple[str, ...]) -> None:
        """`load` of the keys or the values of quantised pages: tiles come into places of their own, some ahead of those that are
        widened."""
        (name,) = names
        self.write_own(refs, work, (name,))
        if name == self.streams[0]:
            self.load_queries(refs, work)
        unit, stages, stored, raw = work.unit, self.sizes.stages, self.sizes.stored, refs[f"{name}_raw"]

        def request(number: Any) -> None:
            place, tile = in_ring(number, stored), unit.tile(number, None)
            self.copy(refs, work, name, tile, refs[f"{name}_stored"].at[place], raw.at[place], True)
            if f"{name}_scales" in refs:
                size = self.sizes.block_kv
                scales = refs[f"{name}_scales"].at[unit.sequence, self.kv_head(work), pl.ds(tile * size, size)]
                plgpu.copy_gmem_to_smem(scales, refs[f"{name}_scale_rows"].at[place], raw.at[place])

        pl.loop(0, jnp.minimum(unit.tiles, stored))(request)

        def widen(number: Any, carry: Any, masked: bool) -> Any:
            slot, place = in_ring(number, stages), in_ring(number, stored)
            pl.when(number >= stages)(lambda: plgpu.barrier_wait(refs[f"{name}_free"].at[slot]))
            plgpu.barrier_wait(raw.at[place])
            self._widen(refs, unit, name, unit.tile(number, masked), place, slot, masked)
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs[f"{name}_full"].at[slot])
            pl.when(number + stored < unit.tiles)(lambda: request(number + stored))
            return carry

        self.visit(unit, widen, None)
        self.drain(refs, unit.tiles, (name,))

    def _widen(
        self, refs: dict[str, Any], unit: Unit, name: str, tile: Any, place: Any, slot: Any, masked: bool
    ) -> None:
        """Numbers of a place as those of another, with their tokens' scales; zeros for values that no row sees."""
        wide, first, step = refs[f"{name}_tiles"].at[slot], tile * self.sizes.block_kv, self.step(name)
        bits = self.there(refs, unit, tile) if masked else None
        for row in range(0, self.sizes.block_kv, ROWS):
            rows, seen, numbers = pl.ds(row, ROWS), None, refs[f"{name}_stored"].at[place]
            if f"{name}_scales" in refs:
                scales = refs[f"{name}_scale_rows"].at[place, rows]
                scales = plgpu.load(scales, layout=WIDENED.reduce(1), optimized=False)  # type: ignore[call-arg] # of jax 0.10
                refs[f"{name}_factors"].at[slot, rows][...] = scales
            if masked and name == self.streams[-1]:
                local = plgpu.broadcasted_iota(jnp.int32, (ROWS, step), 0, layout=WIDENED) + row
                seen = self.seen(unit, local, first, bits)

            def part(column: Any, rows: Any = rows, seen: Any = seen, numbers: Any = numbers) -> None:
                columns = pl.ds(column, step)
                clean = None if seen is None else lambda x: jnp.where(seen, x, jnp.zeros((), x.dtype))
                widen_part(numbers, wide, (rows, columns), clean)

            dim = self.dims[name == "value"]
            if dim <= _AT_ONCE:
                for column in range(0, dim, step):
                    part(column)
            else:
                pl.loop(0, dim, step=step)(part)

    def factors(self, refs: dict[str, Any], name: str, slot: Any, keys: tuple[int, int]) -> jax.Array | None:
        """The scales of a tile's keys or values along columns, where each token has its own. keys: of the tile, from the first
        of these so many."""
        if f"{name}_factors" not in refs:
            return None
        layout, scales = self.in_registers.reduce(0), refs[f"{name}_factors"].at[slot, pl.ds(*keys)]
        of_keys = plgpu.load(scales, layout=layout, optimized=False)  # type: ignore[call-arg] # of jax 0.10
        return lax.broadcast_in_dim(of_keys, (self.sizes.lines, keys[1]), (1,))

    def widening_places(self) -> dict[str, Any]:
        """Places for tiles as they are stored, and their tokens' scales, with the barriers of both."""
        made, sizes = dict[str, Any](), self.sizes
        for (stream,), columns in zip(self.wideners, self.dims, strict=False):
            shape, by_token = (sizes.stored, sizes.block_kv), stream in self.scaled
            made[f"{stream}_stored"] = self.tiles(self.stored, *shape, columns, step=self.step(stream))
            made[f"{stream}_raw"] = plgpu.Barrier(num_arrivals=self.copies + by_token, num_barriers=sizes.stored)
            if by_token:
                made[f"{stream}_scale_rows"] = plgpu.SMEM(shape, jnp.float32)
                made[f"{stream}_factors"] = plgpu.SMEM((sizes.stages, sizes.block_kv), jnp.float32)
        return made
