"""The forward pass: online softmax over the tiles of keys that a block of rows sees.

A warpgroup that computes has 64 rows of its own; the keys are shared. While one waits for its products, the tensor cores' next
work is that of another, so the softmax of one runs beside the products of the other.
"""

from __future__ import annotations

from collections.abc import Callable
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
from ...mosaic.kernel.mosaic_sizes import column_parts
from .block import HopperBlock, filled, zeros
from .hopper_sizes import ROWS
from .tensor_cores import tensor_cores
from .tile import BY_ROW, HopperTile

__all__ = ["HopperForward"]

_TOGETHER = 128  # columns with which the warpgroups share a program


@dataclass(frozen=True)
class HopperForward(HopperBlock):
    """`block_q` rows of a query head, or of the query heads of a kv head, against one part of the keys or all.

    Where a warpgroup can't hold the sums of a row's output, several have 64 rows together: each computes the logits, and has a
    part of the output's columns.
    """

    def __call__(self, refs: dict[str, Any]) -> None:
        if "rows" in refs:  # the output's place is that of the query
            refs = {**refs, **dict(zip(("query_tile", "output_tile"), refs["rows"], strict=True))}
        super().__call__(refs)

    @property
    def apart(self) -> bool:
        """See HopperBlock. With fewer columns the places take no registers either way."""
        return max(self.dims) > _TOGETHER

    @property
    def column_parts(self) -> int:
        """Warpgroups that have the same rows."""
        return column_parts(self.dims[1])

    @property
    def consumers(self) -> int:
        """See HopperBlock."""
        return super().consumers * self.column_parts

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        self.load_keys(refs, place)

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """See HopperBlock."""
        batch, head, q_block = place
        group, part = (warpgroup, 0) if self.column_parts == 1 else (0, warpgroup)
        first_row = q_block * self.sizes.block_q + group * ROWS
        query, ready = refs["query_tile"].at[group], refs["query_full"].at[group]
        self.of_part(
            part, lambda: plgpu.copy_gmem_to_smem(self.rows(refs["query"], batch, head, first_row, ROWS), query, ready)
        )
        plgpu.barrier_wait(ready)
        width, last = self.dims[1] // self.column_parts, self.streams[-1]
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)

        def visit(kv_block: Any, carry: Any, masked: bool) -> Any:
            count, sums, peak, total = carry
            slot = lax.rem(count, sizes.stages)
            plgpu.barrier_wait(refs["key_full"].at[slot])
            (raw,) = products.logits((query, refs["key_tiles"].at[slot]))
            if not self.in_key:
                plgpu.barrier_arrive(refs["key_free"].at[slot])
                plgpu.barrier_wait(refs["value_full"].at[slot])
            tile = HopperTile(
                self.logits, refs, (batch, head), first_row, kv_block * sizes.block_kv, sizes, columns,
                period=self.period, group=self.group,
            )  # fmt: skip
            x, factor, _ = weigh(tile, raw, masked)
            new_peak = jnp.maximum(peak, x.max(axis=1) * factor)
            # A row without visible keys so far keeps shift 0: its exponentials are 0, not NaN.
            hidden = masked or "bias" in refs or self.logits.static_args.score is not None
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak) if hidden else new_peak
            shrink = jnp.exp2(peak - shift)
            weights = jnp.exp2(x * factor - along_rows(shift, x.shape))
            total = total * shrink + weights.sum(axis=1)
            weights = tile.dropped(weights, tile.keep()).astype(query.dtype)
            sums = sums * along_rows(shrink, sums.shape)
            values = refs[f"{last}_tiles"].at[slot]
            if values.shape[1] != width:
                values = values.at[:, pl.ds(part * width, width)]
            (sums,) = products.add_values((sums, weights, values))
            plgpu.barrier_arrive(refs[f"{last}_free"].at[slot])
            return count + 1, sums, new_peak, total

        carry = (jnp.int32(0), *self._start(refs, head, first_row))
        _, sums, peak, total = self.fold_tiles(refs, (batch, head, q_block), visit, carry)
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        lse = jnp.where(visible, (peak + jnp.log(safe) * LOG2E) * LN2, -jnp.inf)
        sums, rows = sums * along_rows(1.0 / safe, sums.shape), pl.ds(first_row, ROWS)
        columns_of_part = pl.ds(part * width, width)
        batch = self.of_split(batch, refs["lse"])
        if self.splits > 1:  # float32, which shared memory has no place for
            target = refs["output"].at[batch, head, rows, columns_of_part]
            plgpu.store(target, sums, optimized=False)  # type: ignore[attr-defined] # of jax 0.10
            output = None
        else:  # the query isn't read any more
            output = query
            if "output_tile" in refs:  # where another warpgroup may still read its
                plgpu.barrier_arrive(refs["query_free"])
                plgpu.barrier_wait(refs["query_free"])
                output = refs["output_tile"].at[warpgroup]
            output[...] = sums.astype(query.dtype)
        refs["lse_rows"].at[warpgroup][...] = lse
        plgpu.commit_smem()
        if output is not None:
            target = self.rows(refs["output"], batch, head, first_row, ROWS)
            plgpu.copy_smem_to_gmem(output, target.at[:, columns_of_part])
        written = refs["lse"].at[batch, head, rows]
        self.of_part(part, lambda: plgpu.copy_smem_to_gmem(refs["lse_rows"].at[warpgroup], written))
        plgpu.wait_smem_to_gmem(0)

    def of_part(self, part: Any, act: Callable[[], None]) -> None:
        """What only the first of the warpgroups with the same rows does."""
        act() if self.column_parts == 1 else pl.when(part == 0)(act)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See HopperBlock."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        groups = self.consumers // self.column_parts
        query = self.tiles(dtype, groups, ROWS, dim)
        made: dict[str, Any] = {"query_tile": query}
        if value_dim != dim and self.splits == 1:
            output = self.tiles(dtype, self.consumers, ROWS, value_dim // self.column_parts)
            made = {"rows": plgpu.RefUnion(query, output), "query_free": plgpu.Barrier(num_arrivals=self.consumers)}
        for name, columns in zip(self.streams, self.dims, strict=False):
            made[f"{name}_tiles"] = self.tiles(dtype, sizes.stages, sizes.block_kv, columns)
        return made | {
            "columns": plgpu.SMEM((self.consumers, sizes.block_kv), jnp.int32),
            "lse_rows": plgpu.SMEM((self.consumers, ROWS), jnp.float32),
            "query_full": plgpu.Barrier(num_barriers=groups),
            **self.barriers(dict.fromkeys(self.streams, 1), self.consumers),
            **self.raw_places(),
        }

    def _start(self, refs: dict[str, Any], head: Any, first_row: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(weighted sums, peak, total) of rows that have seen no key: a sink is a key without a value."""
        sums = zeros(self.dims[1] // self.column_parts)
        if "sinks" not in refs:
            return sums, filled(-jnp.inf), filled(0.0)
        if self.period is None:
            sinks = filled(refs["sinks"][head])
        else:
            sinks = plgpu.load(refs["sinks"].at[head, pl.ds(first_row, ROWS)], layout=BY_ROW, optimized=False)  # type: ignore[call-arg] # of jax 0.10
        sinks = sinks * LOG2E
        if self.splits > 1:  # seen once
            sinks = sinks + jnp.where(self.split() == 0, 0.0, -jnp.inf)
        return sums, sinks, jnp.where(sinks == -jnp.inf, 0.0, 1.0)
