"""What the Hopper kernels share: a block of threads in which one warpgroup loads tiles by TMA and the others compute.

All of them go through the same tiles in the same order, from the same table. A place in shared memory has two barriers: one says
that TMA has filled it, the other that all warpgroups that compute have read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import TileSchedule
from ...kernels.tile_mask import TileLogits
from .hopper_sizes import DIM_STEP, ROWS, HopperSizes
from .tile import BY_COLUMN, BY_ROW, TILE

__all__ = ["BLOCKS", "WARPGROUPS", "HopperBlock", "along_columns", "along_rows", "filled", "zeros"]

BLOCKS, WARPGROUPS = "block", "warpgroup"  # names of the grid's and the threads' axes
# Registers per thread of a warpgroup that loads and of those that compute, by the number of the latter. A block of so many
# warpgroups begins with an equal share of the multiprocessor's registers in units of 8, and what some give up is all that others
# can take: they wait forever for more.
_REGISTERS = {1: (40, 240), 2: (24, 240)}
Copies = list[tuple[Any, str]]  # (what is loaded, the name of the tiles that it is loaded into)


@dataclass(frozen=True)
class HopperBlock:
    """One block of threads. Blocks are numbered (batch, block of rows or of keys, head), the head fastest. heads: of that grid;
    group: query heads of a kv head; blocks: how many of rows, or of keys."""

    sizes: HopperSizes
    logits: TileLogits
    table: TileSchedule
    layout: str
    heads: int
    group: int
    blocks: int
    dims: tuple[int, int]  # of keys and of values, padded
    interpret: bool
    # Under a causal mask the last rows have the most keys, and the first keys the most rows: these blocks start first.
    last_first: ClassVar[bool] = True
    # Whether each warpgroup that computes has a program of its own: the compiler then knows where its tiles lie.
    apart: ClassVar[bool] = False

    def __call__(self, refs: dict[str, Any]) -> None:
        warpgroup = lax.axis_index(WARPGROUPS)
        loads, computes = _REGISTERS[self.consumers]

        def compute(which: Any) -> None:
            plgpu.set_max_registers(computes, action="increase")
            self.compute(refs, self._place(), which)

        if self.apart:
            for number in range(self.consumers):
                pl.when(warpgroup == number)(functools.partial(compute, number))
        else:
            pl.when(warpgroup < self.consumers)(functools.partial(compute, warpgroup))

        @pl.when(warpgroup == self.consumers)
        def _load() -> None:
            plgpu.set_max_registers(loads, action="decrease")
            self.load(refs, self._place())

    def _place(self) -> tuple[Any, Any, Any]:
        """(batch row, head, block of rows or keys)."""
        block = lax.axis_index(BLOCKS)
        head, rest = lax.rem(block, self.heads), lax.div(block, self.heads)
        number = lax.rem(rest, self.blocks)
        return lax.div(rest, self.blocks), head, self.blocks - 1 - number if self.last_first else number

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.sizes.consumers

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """What the warpgroup does that loads."""
        raise NotImplementedError

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """What the others do."""
        raise NotImplementedError

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Places in shared memory, and barriers, by name."""
        raise NotImplementedError

    # -- the warpgroup that loads ------------------------------------------------------------------------------------

    def load_keys(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """The tiles of keys and values that a block of rows sees."""
        batch, head, block = place

        def copies(tile: Any) -> dict[str, Copies]:
            first, kv_head = tile * self.sizes.block_kv, lax.div(head, self.group)
            rows = {
                name: self.rows(refs[name], batch, kv_head, first, self.sizes.block_kv) for name in ("key", "value")
            }
            return {name: [(some, f"{name}_tiles")] for name, some in rows.items()}

        self.drain(refs, self.fill(refs, (batch, head, block), copies, jnp.int32(0)), ("key", "value"))

    def fill(
        self, refs: dict[str, Any], row: tuple[Any, Any, Any], copies: Callable[[Any], dict[str, Copies]], count: Any
    ) -> Any:
        """Every tile of a row of the table into the next place, once that is free. copies: of a tile, by the name of their
        barriers. count: the tiles before; returns them with these."""
        stages = self.sizes.stages

        def load(tile: Any, count: Any, masked: bool) -> Any:
            del masked
            slot = lax.rem(count, stages)
            for name, some in copies(tile).items():

                @pl.when(count >= stages)
                def _wait(name: str = name) -> None:
                    plgpu.barrier_wait(refs[f"{name}_free"].at[slot])

                for source, target in some:
                    plgpu.copy_gmem_to_smem(source, refs[target].at[slot], refs[f"{name}_full"].at[slot])
            return count + 1

        return self.table.fold_tiles(refs["schedule"], *row, 0, 1, load, count)

    def drain(self, refs: dict[str, Any], count: Any, names: tuple[str, ...]) -> None:
        """A block ends only when its places have been read."""
        stages = self.sizes.stages

        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _drain(number: Any) -> None:
            for name in names:
                plgpu.barrier_wait(refs[f"{name}_free"].at[lax.rem(number, stages)])

    def rows(self, ref: Any, batch: Any, head: Any, first: Any, count: int) -> Any:
        """Rows of a head in an array of the call's layout."""
        rows = pl.ds(first, count)
        return ref.at[(batch, rows, head) if self.layout == "bthd" else (batch, head, rows)]

    # -- those that compute ------------------------------------------------------------------------------------------

    def columns(self, refs: dict[str, Any], warpgroup: Any) -> Any:
        """A warpgroup's reference to the numbers of a tile's columns, from 0 on."""
        ref = refs["columns"].at[warpgroup]
        ref[...] = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=BY_COLUMN)
        plgpu.commit_smem()
        return ref

    # -- places and barriers -----------------------------------------------------------------------------------------

    def tiles(self, dtype: Any, *shape: int) -> Any:
        """Places for tiles of 16-bit numbers."""
        step = DIM_STEP if shape[-1] % (2 * DIM_STEP) else 2 * DIM_STEP
        swizzled = plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(2 * step)
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    def barriers(self, copies: dict[str, int]) -> dict[str, Any]:
        """Those of tiles by name; copies: how many fill a place."""
        stages, made = self.sizes.stages, dict[str, Any]()
        for name, arrivals in copies.items():
            made[f"{name}_full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
            made[f"{name}_free"] = plgpu.Barrier(num_arrivals=self.consumers, num_barriers=stages)
        return made


def zeros(columns: int) -> jax.Array:
    """Sums of a warpgroup's rows."""
    sums: jax.Array = plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), TILE)
    return sums


def filled(x: Any) -> jax.Array:
    """A number for each row."""
    rows: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)
    return rows


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row, along it."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each column, along it."""
    return lax.broadcast_in_dim(x, shape, (1,))
