"""The gradient of the query: a block of threads has rows, and goes through the tiles of keys that they see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.weigh import weigh
from ...kernels.scores import without_padded_rows
from ...mosaic.kernel.block import along_rows
from .backward import BY_ROWS, BlackwellGradients
from .backward_sizes import COMPUTING, pipelined
from .blackwell_sizes import ROWS
from .tile import BY_ROW, BlackwellTile

__all__ = ["BlackwellQueryGradient"]


@dataclass(frozen=True)
class BlackwellQueryGradient(BlackwellGradients):
    """`block_q` rows of a query head."""

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See BlackwellGradients."""
        batch, head, q_block = place
        for name in BY_ROWS:
            some = self.rows(refs[name], batch, head, q_block * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(some, refs[f"{name}_tile"], refs["rows_full"])
        self.load_keys(refs, place)

    def multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See BlackwellGradients."""
        batch, head, q_block = place
        stages, ahead = self.sizes.stages, pipelined(self.sizes)
        plgpu.barrier_wait(refs["rows_full"])
        plgpu.barrier_arrive(refs["d_logits_read"])

        def add(count: Any) -> None:
            slot = lax.rem(count, stages)
            plgpu.barrier_wait(refs["d_logits_full"])
            plgpu.tcgen05_mma(refs["query_sums"], refs["d_logits"], refs["key_tiles"].at[slot], accumulate=count > 0)
            plgpu.tcgen05_commit_arrive(refs["key_free"].at[slot])
            plgpu.tcgen05_commit_arrive(refs["d_logits_read"])

        def visit(kv_block: Any, count: Any, masked: bool) -> Any:
            del kv_block, masked
            slot = lax.rem(count, stages)
            for name, rows, keys in (("logits", "query", "key"), ("d_weights", "d_output", "value")):
                plgpu.barrier_wait(refs[f"{keys}_full"].at[slot])
                plgpu.barrier_wait(refs[f"{name}_read"])
                columns = refs[f"{keys}_tiles"].at[slot].transpose((1, 0))
                plgpu.tcgen05_mma(refs[name], refs[f"{rows}_tile"], columns, refs[f"{name}_full"], accumulate=False)
            plgpu.tcgen05_commit_arrive(refs["value_free"].at[slot])
            if ahead:
                pl.when(count > 0)(lambda: add(count - 1))
            else:
                add(count)
            return count + 1

        count = self.table.fold_tiles(refs["schedule"], batch, head, q_block, 0, 1, visit, jnp.int32(0))
        if ahead:
            pl.when(count > 0)(lambda: add(count - 1))

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any) -> None:
        """See BlackwellGradients."""
        batch, head, q_block = place
        sizes, first_row, dtype = self.sizes, q_block * ROWS, refs["query_tile"].dtype
        half = sizes.block_kv // COMPUTING
        columns = pl.ds(which * half, half)
        for name in ("logits", "d_weights"):
            plgpu.barrier_arrive(refs[f"{name}_read"])
        numbers = (refs[name].at[batch, head, pl.ds(first_row, ROWS)] for name in BY_ROWS.values())
        shift, delta = (plgpu.load(some, layout=BY_ROW, optimized=False) for some in numbers)  # type: ignore[call-arg]

        def visit(kv_block: Any, count: Any, masked: bool) -> Any:
            raw = self.take(refs, "logits", columns)
            first_key = kv_block * sizes.block_kv + which * half
            tile = BlackwellTile(self.logits, refs, (batch, head), first_row, first_key, sizes, None, keys=half)
            x, factor, pull = weigh(tile, raw, masked)
            shifts = along_rows(shift, x.shape)
            x = without_padded_rows(self.logits.static_args.score, x, shifts)
            pulled = pull(jnp.exp2(x * factor - shifts))
            d_weights = tile.dropped(self.take(refs, "d_weights", columns), tile.keep())
            d_x = pulled * (d_weights - along_rows(delta, x.shape))
            plgpu.barrier_wait(refs["d_logits_read"])
            self.give(refs, "d_logits", d_x.astype(dtype), columns)
            return count + 1

        count = self.table.fold_tiles(refs["schedule"], batch, head, q_block, 0, 1, visit, jnp.int32(0))
        plgpu.barrier_wait(refs["d_logits_read"])
        target = self.rows(refs["d_query"], batch, head, first_row, ROWS)
        self.store(refs, which, count > 0, [("query_sums", self.logits.scale, refs["query_tile"], target)])

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See MosaicBlock."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        return {
            "query_tile": self.tiles(dtype, ROWS, dim),
            "d_output_tile": self.tiles(dtype, ROWS, value_dim),
            "key_tiles": self.tiles(dtype, sizes.stages, sizes.block_kv, dim),
            "value_tiles": self.tiles(dtype, sizes.stages, sizes.block_kv, value_dim),
            "logits": plgpu.TMEM((ROWS, sizes.block_kv), jnp.float32),
            "d_weights": plgpu.TMEM((ROWS, sizes.block_kv), jnp.float32),
            "d_logits": plgpu.TMEM((ROWS, sizes.block_kv), dtype, packed=True),
            "query_sums": plgpu.TMEM((ROWS, dim), jnp.float32),
            "rows_full": plgpu.Barrier(num_arrivals=len(BY_ROWS)),
            **self.barriers({"key": 1, "value": 1}, 1, orders_tensor_core=True),
            **self.products("logits", "d_weights"),
            "d_logits_full": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True),
            "d_logits_read": plgpu.Barrier(orders_tensor_core=True),
            "stored": plgpu.Barrier(num_arrivals=COMPUTING),
        }
