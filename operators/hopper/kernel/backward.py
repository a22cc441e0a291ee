"""The backward pass: gradients from the weights, which are recomputed from the lse.

One kernel goes by blocks of keys and sums the gradients of key and value over the rows and query heads that see them; one goes by
blocks of rows and sums that of the query. No block adds to what another writes, so results don't depend on the order of blocks.

A factor for each element leads from the gradient of the logits to that of the products. It is applied to the weights, before
other numbers take registers.

Where a warpgroup can't hold the sums of key and value both, one sums those of the keys and another those of the values, for the
same 64 keys: the weights are then computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.weigh import weigh
from ...kernels.scores import without_padded_rows
from ...mosaic.kernel.block import Copies, along_columns, along_rows
from .block import HopperBlock, zeros
from .hopper_sizes import ROWS, divided, key_warpgroups
from .tensor_cores import tensor_cores
from .tile import BY_COLUMN, BY_ROW, HopperTile

__all__ = ["HopperKeyGradients", "HopperQueryGradient"]

_SUMS_BESIDE_BOTH = 128  # columns of sums beside which a warpgroup holds two products at once

_ROWS = {"query": "lse", "d_output": "delta"}  # what is loaded by rows, and the numbers of the rows that come with it


@dataclass(frozen=True)
class HopperQueryGradient(HopperBlock):
    """`block_q` rows of a query head."""

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        self.load_keys(refs, place)

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """See HopperBlock."""
        batch, head, q_block = place
        first_row = q_block * self.sizes.block_q + warpgroup * ROWS
        ready = refs["rows_full"].at[warpgroup]
        query, d_output = (refs[f"{name}_tile"].at[warpgroup] for name in _ROWS)
        for name, held in zip(_ROWS, (query, d_output), strict=True):
            plgpu.copy_gmem_to_smem(self.rows(refs[name], batch, head, first_row, ROWS), held, ready)
        numbers = (refs[name].at[batch, head, pl.ds(first_row, ROWS)] for name in _ROWS.values())
        shift, delta = (plgpu.load(some, layout=BY_ROW, optimized=False) for some in numbers)  # type: ignore[call-arg]
        plgpu.barrier_wait(ready)
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)
        both = self.dims[0] <= _SUMS_BESIDE_BOTH

        def visit(kv_block: Any, carry: Any, masked: bool) -> Any:
            count, sums = carry
            slot = lax.rem(count, sizes.stages)
            keys, values = refs["key_tiles"].at[slot], refs["value_tiles"].at[slot]
            for name in ("key", "value"):
                plgpu.barrier_wait(refs[f"{name}_full"].at[slot])
            raw, *d_weights = products.logits((query, keys), *[(d_output, values)][:both])
            if both:
                plgpu.barrier_arrive(refs["value_free"].at[slot])
            tile = HopperTile(self.logits, refs, (batch, head), first_row, kv_block * sizes.block_kv, sizes, columns)
            x, factor, pull = weigh(tile, raw, masked)
            shifts = along_rows(shift, x.shape)
            x = without_padded_rows(self.logits.static_args.score, x, shifts)
            weights, keep = jnp.exp2(x * factor - shifts), tile.keep()
            if not both:
                d_weights = list(products.logits((d_output, values)))
                plgpu.barrier_arrive(refs["value_free"].at[slot])
            d_x = pull(weights) * (tile.dropped(d_weights[0], keep) - along_rows(delta, x.shape))
            (sums,) = products.add_values((sums, d_x.astype(query.dtype), keys))
            plgpu.barrier_arrive(refs["key_free"].at[slot])
            return count + 1, sums

        carry = (jnp.int32(0), zeros(self.dims[0]))
        _, sums = self.table.fold_tiles(refs["schedule"], batch, head, q_block, 0, 1, visit, carry)
        query[...] = (sums * self.logits.scale).astype(query.dtype)  # the query isn't read any more
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query, self.rows(refs["d_query"], batch, head, first_row, ROWS))
        plgpu.wait_smem_to_gmem(0)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See HopperBlock."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        return {
            "query_tile": self.tiles(dtype, self.consumers, ROWS, dim),
            "d_output_tile": self.tiles(dtype, self.consumers, ROWS, value_dim),
            "key_tiles": self.tiles(dtype, sizes.stages, sizes.block_kv, dim),
            "value_tiles": self.tiles(dtype, sizes.stages, sizes.block_kv, value_dim),
            "columns": plgpu.SMEM((self.consumers, sizes.block_kv), jnp.int32),
            "rows_full": plgpu.Barrier(num_arrivals=len(_ROWS), num_barriers=self.consumers),
            **self.barriers({"key": 1, "value": 1}, self.consumers),
        }


@dataclass(frozen=True)
class HopperKeyGradients(HopperBlock):
    """`block_kv` keys of a kv head. A tile is [keys, rows]: what is multiplied with it lies in the order that wgmma wants."""

    last_first: ClassVar[bool] = False

    @property
    def consumers(self) -> int:
        """See HopperBlock."""
        return key_warpgroups(self.sizes, *self.dims)

    @property
    def divided(self) -> bool:
        """Whether key and value have a warpgroup each."""
        return divided(*self.dims)

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See HopperBlock."""
        batch, block_q = place[0], self.sizes.block_q

        def copies(at: tuple[Any, Any]) -> dict[str, Copies]:
            head, tile = at
            first = tile * block_q
            some = [(self.rows(refs[name], batch, head, first, block_q), f"{name}_tiles") for name in _ROWS]
            numbers = [(refs[name].at[batch, head, pl.ds(first, block_q)], f"{name}_tiles") for name in _ROWS.values()]
            return {"rows": [*some, *numbers]}

        count = self.fill(refs, place, copies, jnp.int32(0), self.fold_heads)
        self.drain(refs, count, ("rows",))

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: Any) -> None:
        """See HopperBlock."""
        if self.divided:
            self._sum(refs, place, warpgroup, 0, ("key", "value")[warpgroup : warpgroup + 1])
        else:
            self._sum(refs, place, warpgroup, warpgroup, ("key", "value"))

    def _sum(
        self, refs: dict[str, Any], place: tuple[Any, Any, Any], warpgroup: int, which: int, names: tuple[str, ...]
    ) -> None:
        """The gradients of the `which`-th 64 keys: of keys, of values or of both."""
        batch, kv_head, kv_block = place
        first_key = kv_block * self.sizes.block_kv + which * ROWS
        held = {name: refs[f"{name}_tile"].at[which] for name in ("key", "value")}
        # Of two warpgroups with the same keys each loads one of the arrays, and waits for both.
        for name in names:
            plgpu.copy_gmem_to_smem(
                self.rows(refs[name], batch, kv_head, first_key, ROWS), held[name], refs["keys_full"].at[which]
            )
        plgpu.barrier_wait(refs["keys_full"].at[which])
        products, sizes, columns = tensor_cores(self.interpret), self.sizes, self.columns(refs, warpgroup)
        dtype = held["key"].dtype

        def visit(at: tuple[Any, Any], carry: Any, masked: bool) -> Any:
            head, q_block = at
            count, sums = carry
            slot = lax.rem(count, sizes.stages)
            queries, d_outputs = (refs[f"{name}_tiles"].at[slot] for name in _ROWS)
            plgpu.barrier_wait(refs["rows_full"].at[slot])
            factors = [(held["key"], queries), (held["value"], d_outputs)]
            # Dropout's random numbers take the registers that the gradients of weights would.
            both = "key" in names and "dropout" not in refs
            raw, *d_weights = products.logits(*factors[: 2 if both else 1])
            tile = HopperTile(
                self.logits, refs, (batch, head), q_block * sizes.block_q, first_key, sizes, columns, by_keys=True
            )
            x, factor, pull = weigh(tile, raw, masked)
            shifts = along_columns(products.numbers(refs["lse_tiles"].at[slot], BY_COLUMN), x.shape)
            x = without_padded_rows(self.logits.static_args.score, x, shifts)
            weights, keep = jnp.exp2(x * factor - shifts), tile.keep()
            if "key" in names and not both:
                d_weights = list(products.logits(factors[1]))
            terms = {"value": (tile.dropped(weights, keep), d_outputs)}
            if d_weights:
                delta = products.numbers(refs["delta_tiles"].at[slot], BY_COLUMN)
                d_kept = tile.dropped(d_weights[0], keep)
                terms["key"] = (pull(weights) * (d_kept - along_columns(delta, x.shape)), queries)
            added = [
                (total, terms[name][0].astype(dtype), terms[name][1]) for name, total in zip(names, sums, strict=True)
            ]
            sums = products.add_values(*added)
            plgpu.barrier_arrive(refs["rows_free"].at[slot])
            return count + 1, sums

        sums = tuple(zeros(self.dims[name == "value"]) for name in names)
        _, sums = self.fold_heads(refs, place, visit, (jnp.int32(0), sums))
        if self.divided:  # the other warpgroup may still read what is written here
            plgpu.barrier_arrive(refs["keys_free"])
            plgpu.barrier_wait(refs["keys_free"])
        for name, gradient in zip(names, sums, strict=True):
            held[name][...] = (gradient * self.logits.scale if name == "key" else gradient).astype(dtype)
        plgpu.commit_smem()
        for name in names:
            plgpu.copy_smem_to_gmem(held[name], self.rows(refs[f"d_{name}"], batch, kv_head, first_key, ROWS))
        plgpu.wait_smem_to_gmem(0)

    def fold_heads(self, refs: dict[str, Any], place: tuple[Any, Any, Any], visit: Any, carry: Any) -> Any:
        """visit((query head, tile), carry, masked) for the tiles of a kv head's query heads. Where these have one table, a tile
        is visited for each in turn: a loop over heads around the one over tiles takes registers, which are few beside the sums
        of key and value."""
        batch, kv_head, kv_block = place

        def of_head(number: Any, carry: Any) -> Any:
            head = kv_head * self.group + number
            return self.fold_tiles(refs, (batch, head, kv_block), lambda tile, *rest: visit((head, tile), *rest), carry)

        def of_all(at: tuple[Any, Any], *rest: Any) -> Any:
            tile, number = at
            return visit((kv_head * self.group + number, tile), *rest)

        if self.group == 1:
            return of_head(0, carry)
        if self.divided or _by_pair(refs) or self.table.table.shape[1] > 1:
            return lax.fori_loop(0, self.group, of_head, carry)
        return self.table.fold_tiles(refs["schedule"], batch, 0, kv_block, 0, 1, of_all, carry, times=self.group)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See HopperBlock."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        parts = sizes.block_kv // ROWS
        made = {
            "key_tile": self.tiles(dtype, parts, ROWS, dim),
            "value_tile": self.tiles(dtype, parts, ROWS, value_dim),
            "query_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, dim),
            "d_output_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, value_dim),
            **{f"{name}_tiles": plgpu.SMEM((sizes.stages, sizes.block_q), jnp.float32) for name in _ROWS.values()},
            "columns": plgpu.SMEM((self.consumers, sizes.block_q), jnp.int32),
            "keys_full": plgpu.Barrier(num_arrivals=2, num_barriers=parts),
            **self.barriers({"rows": 2 * len(_ROWS)}, self.consumers),
        }
        if self.divided:
            made["keys_free"] = plgpu.Barrier(num_arrivals=2)
        return made


def _by_pair(refs: dict[str, Any]) -> bool:
    """Whether a bias or a score has a number for each pair of a row and a key, which is loaded into registers."""
    arrays = [ref for name, ref in refs.items() if name == "bias" or name.startswith("capture")]
    return any(min(ref.shape[2:]) > 1 for ref in arrays)
