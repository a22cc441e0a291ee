"""The forward pass: online softmax over the tiles of keys that a block of rows sees.

A warpgroup that computes has 64 rows of its own; the keys are shared. While one waits for its products, the tensor cores' next
work is that of another, so the softmax of one runs beside the products of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.weigh import weigh
from ...kernels.lse import LN2, LOG2E
from ...mosaic.kernel.block import along_rows
from .block import HopperBlock, filled, zeros
from .hopper_sizes import ROWS
from .tensor_cores import tensor_cores
from .tile import HopperTile

__all__ = ["HopperForward"]


@dataclass(frozen=True)
class HopperForward(HopperBlock):
    """`block_q` rows of a query head."""

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        self.load_keys(refs, place)

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """See HopperBlock."""
        batch, head, q_block = place
        first_row = q_block * self.sizes.block_q + warpgroup * ROWS
        query, ready = refs["query_tile"].at[warpgroup], refs["query_full"].at[warpgroup]
        plgpu.copy_gmem_to_smem(self.rows(refs["query"], batch, head, first_row, ROWS), query, ready)
        plgpu.barrier_wait(ready)
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)

        def visit(kv_block: Any, carry: Any, masked: bool) -> Any:
            count, sums, peak, total = carry
            slot = lax.rem(count, sizes.stages)
            plgpu.barrier_wait(refs["key_full"].at[slot])
            (raw,) = products.logits((query, refs["key_tiles"].at[slot]))
            plgpu.barrier_arrive(refs["key_free"].at[slot])
            tile = HopperTile(self.logits, refs, (batch, head), first_row, kv_block * sizes.block_kv, sizes, columns)
            x, factor, _ = weigh(tile, raw, masked)
            new_peak = jnp.maximum(peak, x.max(axis=1) * factor)
            # A row without visible keys so far keeps shift 0: its exponentials are 0, not NaN.
            hidden = masked or "bias" in refs or self.logits.static_args.score is not None
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak) if hidden else new_peak
            shrink = jnp.exp2(peak - shift)
            weights = jnp.exp2(x * factor - along_rows(shift, x.shape))
            total = total * shrink + weights.sum(axis=1)
            weights = tile.dropped(weights, tile.keep())
            sums = sums * along_rows(shrink, sums.shape)
            plgpu.barrier_wait(refs["value_full"].at[slot])
            (sums,) = products.add_values((sums, weights.astype(query.dtype), refs["value_tiles"].at[slot]))
            plgpu.barrier_arrive(refs["value_free"].at[slot])
            return count + 1, sums, new_peak, total

        carry = (jnp.int32(0), *self._start(refs, head))
        _, sums, peak, total = self.table.fold_tiles(refs["schedule"], batch, head, q_block, 0, 1, visit, carry)
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        lse = jnp.where(visible, (peak + jnp.log(safe) * LOG2E) * LN2, -jnp.inf)
        # The query isn't read any more.
        output = refs["output_tile"].at[warpgroup] if "output_tile" in refs else query
        output[...] = (sums * along_rows(1.0 / safe, sums.shape)).astype(query.dtype)
        refs["lse_rows"].at[warpgroup][...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(output, self.rows(refs["output"], batch, head, first_row, ROWS))
        plgpu.copy_smem_to_gmem(refs["lse_rows"].at[warpgroup], refs["lse"].at[batch, head, pl.ds(first_row, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See HopperBlock."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        made = {
            "query_tile": self.tiles(dtype, self.consumers, ROWS, dim),
            "key_tiles": self.tiles(dtype, sizes.stages, sizes.block_kv, dim),
            "value_tiles": self.tiles(dtype, sizes.stages, sizes.block_kv, value_dim),
            "columns": plgpu.SMEM((self.consumers, sizes.block_kv), jnp.int32),
            "lse_rows": plgpu.SMEM((self.consumers, ROWS), jnp.float32),
            "query_full": plgpu.Barrier(num_barriers=self.consumers),
            **self.barriers({"key": 1, "value": 1}, self.consumers),
        }
        if value_dim != dim:
            made["output_tile"] = self.tiles(dtype, self.consumers, ROWS, value_dim)
        return made

    def _start(self, refs: dict[str, Any], head: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(weighted sums, peak, total) of rows that have seen no key: a sink is a key without a value."""
        sums = zeros(self.dims[1])
        if "sinks" not in refs:
            return sums, filled(-jnp.inf), filled(0.0)
        sink = refs["sinks"][head] * LOG2E
        return sums, filled(sink), filled(jnp.where(sink == -jnp.inf, 0.0, 1.0))
