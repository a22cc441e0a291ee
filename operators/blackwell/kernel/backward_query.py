"""The gradient of the query: a block of threads has rows, and goes through the tiles of keys that they see.

Where values are the first columns of their keys, and tensor memory can't hold the sums of so many columns, a block sums a part
each time. Shared memory has no room then for the output's gradient beside the query, so it is a factor in tensor memory; and
gradients of logits take the places of those of weights once both warpgroups have these in registers. Tensor memory holds all sums
of 64 rows, but their products take as long as those of 128 and have 64 keys at least: shared memory has room for one such tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked
from ...flash.kernel.weigh import weigh
from ...kernels.scores import without_padded_rows
from ...mosaic.kernel.block import along_rows, in_ring, part_of
from ...mosaic.kernel.mosaic_sizes import DIM_STEP, Sums
from .backward import BY_ROWS, BlackwellGradients
from .backward_sizes import COMPUTING, pipelined
from .blackwell_sizes import ROWS
from .tile import BY_ROW, OUTPUT, BlackwellTile

__all__ = ["BlackwellQueryGradient"]


@dataclass(frozen=True)
class BlackwellQueryGradient(BlackwellGradients):
    """`block_q` rows of a query head."""

    which: ClassVar[str] = "dq"

    @property
    def held(self) -> bool:
        """Whether the output's gradient is in tensor memory."""
        return len(self.turns) > 1

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See BlackwellGradients."""
        batch, head, q_block = place

        def hold(name: str, target: str, barrier: str) -> None:
            some = self.rows(refs[name], batch, head, q_block * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(some, refs[target], refs[barrier])

        if self.held:
            hold("d_output", "d_output_rows", "d_output_full")
            plgpu.barrier_wait(refs["d_output_held"])
            hold("query", "query_tile", "rows_full")
        else:
            for name in BY_ROWS:
                hold(name, f"{name}_tile", "rows_full")
        self.load_keys(refs, place, times=len(self.turns))

    def multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See BlackwellGradients."""
        if self.held:
            plgpu.barrier_wait(refs["d_output_held"])
        plgpu.barrier_wait(refs["rows_full"])
        plgpu.barrier_arrive(refs["d_logits_read"])
        count = jnp.int32(0)
        for number, turn in enumerate(self.turns):
            if number:  # the sums before are read
                plgpu.barrier_wait(refs["stored"])
            count = self._multiply(refs, place, turn, count)
            plgpu.tcgen05_commit_arrive(refs["sums_full"])

    def _multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any], turn: tuple[Sums, ...], before: Any) -> Any:
        """The products of all tiles for these sums. before: the number of tiles before these; returns it with them."""
        stages, ahead = self.sizes.stages, pipelined(self.sizes)
        begin = turn[0].first

        def add(count: Any) -> None:
            slot = in_ring(count, stages)
            plgpu.barrier_wait(refs["d_logits_full"])
            for one in turn:
                sums = refs["sums"].at[:, pl.ds(one.first - begin, one.columns)]
                keys = part_of(refs["key_tiles"].at[slot], one)
                plgpu.tcgen05_mma(sums, refs["d_logits"], keys, accumulate=count > before)
            plgpu.tcgen05_commit_arrive(refs["key_free"].at[slot])
            plgpu.tcgen05_commit_arrive(refs["d_logits_read"])

        def multiply(name: str, rows: str, keys: str, slot: Any, place: str) -> None:
            if keys in self.streams:
                plgpu.barrier_wait(refs[f"{keys}_full"].at[slot])
            plgpu.barrier_wait(refs[f"{place}_read"])
            tile = self.columns_of(keys, refs[f"{'key' if self.in_key else keys}_tiles"].at[slot])
            columns = tile.transpose((1, 0))
            plgpu.tcgen05_mma(refs[name], refs[f"{rows}_tile"], columns, refs[f"{name}_full"], accumulate=False)

        def add_last(count: Any) -> None:
            """Those of the tile before."""
            pl.when(count > before)(lambda: add(count - 1))

        def visit(kv_block: Any, count: Any) -> Any:
            del kv_block
            slot = in_ring(count, stages)
            multiply("logits", "query", "key", slot, "logits")
            if ahead and self.held:
                add_last(count)
            multiply("d_weights", "d_output", "value", slot, "d_logits" if self.held else "d_weights")
            if not self.in_key:
                plgpu.tcgen05_commit_arrive(refs["value_free"].at[slot])
            if ahead and not self.held:
                add_last(count)
            if not ahead:
                add(count)
            return count + 1

        count = self.each_tile(refs, place, visit, before)
        if ahead:
            add_last(count)
        return count

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any) -> None:
        """See BlackwellGradients."""
        batch, head, q_block = place
        first_row = q_block * ROWS
        plgpu.barrier_arrive(refs["logits_read"])
        if self.held:
            self._hold(refs, which)
        else:
            plgpu.barrier_arrive(refs["d_weights_read"])
        refs = BlackwellTile.with_numbers(refs, self.logits.static_args.mask, batch, first_row)
        numbers = (refs[name].at[batch, head, pl.ds(first_row, ROWS)] for name in BY_ROWS.values())
        of_rows = [plgpu.load(some, layout=BY_ROW, optimized=False) for some in numbers]  # type: ignore[call-arg]
        count = jnp.int32(0)
        for turn in self.turns:
            before, count = count, self._compute(refs, place, which, of_rows, count)
            plgpu.barrier_wait(refs["sums_full"])
            target = self.rows(refs["d_query"], batch, head, first_row, ROWS)
            some, scale = count > before, self.logits.scale
            if self.in_pieces:
                columns = sum(one.columns for one in turn)
                sums, target = refs["sums"].at[:, pl.ds(0, columns)], target.at[:, pl.ds(turn[0].first, columns)]
                self.store_pieces(refs, which, some, sums, scale, target)
            else:
                self.store(refs, which, some, [(refs["sums"], scale, refs["query_tile"], target)])

    def _hold(self, refs: dict[str, Any], which: Any) -> None:
        """Half of the output's gradient to tensor memory."""
        plgpu.barrier_wait(refs["d_output_full"])

        @pl.loop(0, self.dims[1] // (COMPUTING * DIM_STEP))
        def _part(number: Any) -> None:
            columns = pl.ds((COMPUTING * number + which) * DIM_STEP, DIM_STEP)
            some = plgpu.load(refs["d_output_rows"].at[:, columns], layout=OUTPUT)  # type: ignore[call-arg] # of jax 0.10
            plgpu.async_store_tmem(refs["d_output_tile"].at[:, columns], some)

        plgpu.commit_smem()  # of the reads
        plgpu.commit_tmem()
        plgpu.barrier_arrive(refs["d_output_held"])

    def _compute(
        self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any, of_rows: list[Any], count: Any
    ) -> Any:
        """The gradients of the logits of all tiles. of_rows: the lse and delta of each row. count: as in `_multiply`."""
        batch, head, q_block = place
        sizes, dtype, (shift, delta) = self.sizes, refs["query_tile"].dtype, of_rows
        half = sizes.block_kv // COMPUTING
        columns = pl.ds(which * half, half)

        def visit(kv_block: Any, count: Any, masked: Masked) -> Any:
            raw = self.take(refs, "logits", columns)
            first_key = kv_block * sizes.block_kv + which * half
            tile = BlackwellTile(
                self.logits, refs, (batch, head), q_block * ROWS, first_key, sizes, None, keys=half,
                by_ids=masked is Masked.BY_IDS,
            )  # fmt: skip
            x, factor, pull = weigh(tile, raw, masked)

            def gradients(x: jax.Array, d_weights: Callable[[], jax.Array]) -> jax.Array:
                shifts = along_rows(shift, x.shape)
                x = without_padded_rows(self.logits.static_args.score, x, shifts)
                pulled = pull(jnp.exp2(x * factor - shifts))
                d_kept = tile.dropped(d_weights(), tile.keep())
                d_x = pulled * (d_kept - along_rows(delta, x.shape))
                return d_x.astype(dtype)

            take = functools.partial(self.take, refs, "d_weights", columns)
            seen = self.seen(refs, tile, masked)
            if seen.everything:
                d_x = gradients(tile.within(x) if masked else x, take)
            else:
                taken = take()
                d_x = seen.where_seen(
                    0,
                    lambda: gradients(tile.within(x, seen.span), lambda: taken),
                    lambda: jnp.zeros(taken.shape, dtype),
                )
            plgpu.barrier_wait(refs["d_weights_read" if self.held else "d_logits_read"])
            self.give(refs, "d_logits", d_x, columns)
            return count + 1

        return self.fold_tiles(refs, (batch, head, q_block), visit, count)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See MosaicBlock."""
        sizes, step = self.sizes, self.swizzled(self.sizes.block_kv)
        query, d_output = (self.tiles(dtype, ROWS, columns, step=step) for columns in self.dims)
        products = plgpu.TMEM((ROWS, sizes.block_kv), jnp.float32)
        factors = plgpu.TMEM((ROWS, sizes.block_kv), dtype, packed=True)
        made: dict[str, Any] = {
            "query_tile": query,
            "d_output_tile": d_output,
            "d_weights": products,
            "d_logits": factors,
        }
        if self.held:
            made = {
                "query_tile d_output_rows": plgpu.RefUnion(query, d_output),
                "d_output_tile": plgpu.TMEM((ROWS, self.dims[1]), dtype, packed=True),
                "d_output_full": plgpu.Barrier(),
                "d_output_held": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True),
                "d_weights d_logits": plgpu.RefUnion(products, factors),
            }
        for name, columns in zip(self.streams, self.dims, strict=False):
            made[f"{name}_tiles"] = self.tiles(dtype, sizes.stages, sizes.block_kv, columns, step=step)
        return made | {
            "logits": products,
            "sums": plgpu.TMEM((ROWS, self.summed), jnp.float32),
            "rows_full": plgpu.Barrier(num_arrivals=1 if self.held else len(BY_ROWS)),
            **self.barriers(dict.fromkeys(self.streams, 1), 1, orders_tensor_core=True),
            **self.products("logits", "d_weights"),
            "d_logits_full": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True),
            "d_logits_read": plgpu.Barrier(orders_tensor_core=True),
            "sums_full": plgpu.Barrier(orders_tensor_core=True),
            "stored": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=self.held),
            **self.piece_places(dtype),
        }
