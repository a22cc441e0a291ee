"""The forward pass of a block of threads: one warpgroup loads tiles of keys and values by TMA, the others compute.

A warpgroup that computes has 64 rows of its own; the keys are shared. While one waits for its products, the tensor cores' next
work is that of another, so the softmax of one runs beside the products of the other. Both sides go through the same tiles in the
same order, from the same table. A place in shared memory has two barriers: one says that TMA has filled it, the other that all
warpgroups have read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import TileSchedule
from ...flash.kernel.weigh import weigh
from ...kernels.lse import LN2, LOG2E
from ...kernels.tile_mask import TileLogits
from .hopper_sizes import ROWS, HopperSizes
from .tensor_cores import tensor_cores
from .tile import BY_ROW, TILE, HopperTile

__all__ = ["BLOCKS", "WARPGROUPS", "HopperForward"]

BLOCKS, WARPGROUPS = "block", "warpgroup"  # names of the grid's and the threads' axes
# Registers per thread of a warpgroup that loads and of those that compute, by the number of the latter. A block of so many
# warpgroups begins with an equal share of the multiprocessor's registers in units of 8, and what some give up is all that others
# can take: they wait forever for more.
_REGISTERS = {1: (40, 240), 2: (40, 232)}


@dataclass(frozen=True)
class HopperForward:
    """One block of threads: `block_q` rows of a query head. Blocks are numbered (batch, rows, head), the head fastest."""

    sizes: HopperSizes
    logits: TileLogits
    table: TileSchedule
    layout: str
    heads: int
    group: int
    q_blocks: int
    value_dim: int  # padded
    interpret: bool

    def __call__(self, refs: dict[str, Any]) -> None:
        block, warpgroup = lax.axis_index(BLOCKS), lax.axis_index(WARPGROUPS)
        head, rest = lax.rem(block, self.heads), lax.div(block, self.heads)
        # Under a causal mask the last rows have the most keys, so they start first.
        q_block = self.q_blocks - 1 - lax.rem(rest, self.q_blocks)
        place = lax.div(rest, self.q_blocks), head, q_block
        loads, computes = _REGISTERS[self.sizes.consumers]

        @pl.when(warpgroup < self.sizes.consumers)
        def _compute() -> None:
            plgpu.set_max_registers(computes, action="increase")
            self._compute(refs, place, warpgroup)

        @pl.when(warpgroup == self.sizes.consumers)
        def _load() -> None:
            plgpu.set_max_registers(loads, action="decrease")
            self._load(refs, place)

    # -- the warpgroup that loads ------------------------------------------------------------------------------------

    def _load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """Every tile into the next place, once that is free."""
        batch, head, q_block = place
        stages = self.sizes.stages

        def load(tile: Any, count: Any, masked: bool) -> Any:
            del masked
            slot = lax.rem(count, stages)
            first = tile * self.sizes.block_kv
            for name in ("key", "value"):

                @pl.when(count >= stages)
                def _wait(name: str = name) -> None:
                    plgpu.barrier_wait(refs[f"{name}_free"].at[slot])

                rows = self._rows(refs[name], batch, lax.div(head, self.group), first, self.sizes.block_kv)
                plgpu.copy_gmem_to_smem(rows, refs[f"{name}_tiles"].at[slot], refs[f"{name}_full"].at[slot])
            return count + 1

        count = self.table.fold_tiles(refs["schedule"], batch, head, q_block, 0, 1, load, jnp.int32(0))

        # A block ends only when its places have been read.
        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _drain(number: Any) -> None:
            for name in ("key", "value"):
                plgpu.barrier_wait(refs[f"{name}_free"].at[lax.rem(number, stages)])

    def _rows(self, ref: Any, batch: Any, head: Any, first: Any, count: int) -> Any:
        """Rows of a head in an array of the call's layout."""
        rows = pl.ds(first, count)
        return ref.at[(batch, rows, head) if self.layout == "bthd" else (batch, head, rows)]

    # -- those that compute ------------------------------------------------------------------------------------------

    def _compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """Online softmax over the tiles."""
        batch, head, q_block = place
        first_row = q_block * self.sizes.block_q + warpgroup * ROWS
        query, ready = refs["query_tile"].at[warpgroup], refs["query_full"].at[warpgroup]
        plgpu.copy_gmem_to_smem(self._rows(refs["query"], batch, head, first_row, ROWS), query, ready)
        plgpu.barrier_wait(ready)
        products, sizes = tensor_cores(self.interpret), self.sizes
        kv_len = self.logits.static_args.kv_len

        def visit(kv_block: Any, carry: Any, masked: bool) -> Any:
            count, sums, peak, total = carry
            slot = lax.rem(count, sizes.stages)
            plgpu.barrier_wait(refs["key_full"].at[slot])
            raw = products.logits(query, refs["key_tiles"].at[slot])
            plgpu.barrier_arrive(refs["key_free"].at[slot])
            tile = HopperTile(
                self.logits, refs, batch, head, first_row, kv_block * sizes.block_kv, (ROWS, sizes.block_kv),
                padded=kv_len % sizes.block_kv != 0,
            )  # fmt: skip
            x, factor, _ = weigh(tile, raw, masked)
            new_peak = jnp.maximum(peak, x.max(axis=1) * factor)
            # A row without visible keys so far keeps shift 0: its exponentials are 0, not NaN.
            hidden = masked or self.logits.static_args.score is not None
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak) if hidden else new_peak
            shrink = jnp.exp2(peak - shift)
            weights = jnp.exp2(x * factor - _along_rows(shift, x.shape))
            total = total * shrink + weights.sum(axis=1)
            sums = sums * _along_rows(shrink, sums.shape)
            plgpu.barrier_wait(refs["value_full"].at[slot])
            sums = products.add_values(sums, weights.astype(query.dtype), refs["value_tiles"].at[slot])
            plgpu.barrier_arrive(refs["value_free"].at[slot])
            return count + 1, sums, new_peak, total

        carry = (jnp.int32(0), *self._start(refs, head))
        _, sums, peak, total = self.table.fold_tiles(refs["schedule"], batch, head, q_block, 0, 1, visit, carry)
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        lse = jnp.where(visible, (peak + jnp.log(safe) * LOG2E) * LN2, -jnp.inf)
        # The query isn't read any more.
        output = refs["output_tile"].at[warpgroup] if "output_tile" in refs else query
        output[...] = (sums * _along_rows(1.0 / safe, sums.shape)).astype(query.dtype)
        refs["lse_rows"].at[warpgroup][...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(output, self._rows(refs["output"], batch, head, first_row, ROWS))
        plgpu.copy_smem_to_gmem(refs["lse_rows"].at[warpgroup], refs["lse"].at[batch, head, pl.ds(first_row, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    def _start(self, refs: dict[str, Any], head: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(weighted sums, peak, total) of rows that have seen no key: a sink is a key without a value."""
        sums = plgpu.layout_cast(jnp.zeros((ROWS, self.value_dim), jnp.float32), TILE)
        if "sinks" not in refs:
            return sums, _filled(-jnp.inf), _filled(0.0)
        sink = refs["sinks"][head] * LOG2E
        return sums, _filled(sink), _filled(jnp.where(sink == -jnp.inf, 0.0, 1.0))


def _filled(x: Any) -> jax.Array:
    """A number for each row."""
    rows: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)
    return rows


def _along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row, along it."""
    return lax.broadcast_in_dim(x, shape, (0,))
