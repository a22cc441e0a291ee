"""The gradients of key and value: a block of threads has keys, and goes through the tiles of rows that see them.

Where tensor memory can't hold both sums, a block goes through its tiles twice: first for those of the values, then for those of
the keys. Values aren't needed the first time: their gradient takes their place in shared memory before they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.weigh import weigh
from ...kernels.scores import without_padded_rows
from ...mosaic.kernel.block import Copies, along_columns
from .backward import BY_ROWS, BlackwellGradients
from .backward_sizes import COMPUTING, divided, pipelined
from .blackwell_sizes import ROWS
from .tile import TILE, BlackwellTile

__all__ = ["BlackwellKeyGradients"]

_BY_COLUMN = TILE.reduce(0)  # one number a column
# By what is summed: the factor in tensor memory, and what it is multiplied with.
_FACTORS = {"value": ("weights", "d_output"), "key": ("d_logits", "query")}


@dataclass(frozen=True)
class BlackwellKeyGradients(BlackwellGradients):
    """`block_kv` keys of a kv head. A tile is [keys, rows]: then weights and gradients of logits are factors as they lie. They
    take the places of logits and of gradients of weights once both warpgroups have these in registers."""

    last_first: ClassVar[bool] = False

    @property
    def turns(self) -> tuple[tuple[str, ...], ...]:
        """What is summed each time that the block goes through its tiles."""
        return (("value",), ("key",)) if divided(*self.dims) else (("value", "key"),)

    def load(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See BlackwellGradients."""
        batch, kv_head, kv_block = place
        block_q = self.sizes.block_q

        def of_head(number: Any, count: Any) -> Any:
            head = kv_head * self.group + number

            def copies(tile: Any) -> dict[str, Copies]:
                first = tile * block_q
                some = [(self.rows(refs[name], batch, head, first, block_q), f"{name}_tiles") for name in BY_ROWS]
                numbers = [
                    (refs[name].at[batch, head, pl.ds(first, block_q)], f"{name}_tiles") for name in BY_ROWS.values()
                ]
                return {"rows": [*some, *numbers]}

            return self.fill(refs, (batch, head, kv_block), copies, count)

        def hold(name: str) -> None:
            some = self.rows(refs[name], batch, kv_head, kv_block * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(some, refs[f"{name}_tile"], refs[f"{name}_full"])

        hold("key")
        count = jnp.int32(0)
        for number, _ in enumerate(self.turns):
            if number:
                plgpu.barrier_wait(refs["value_free"])
            if number == len(self.turns) - 1:
                hold("value")
            count = self._of_heads(of_head, count)
        self.drain(refs, count, ("rows",))

    def multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See BlackwellGradients."""
        plgpu.barrier_wait(refs["key_full"])
        for factor, _ in _FACTORS.values():
            plgpu.barrier_arrive(refs[f"{factor}_read"])
        count = jnp.int32(0)
        for number, names in enumerate(self.turns):
            if number:  # the sums of the first time are read
                plgpu.barrier_wait(refs["stored"])
            if "key" in names:
                plgpu.barrier_wait(refs["value_full"])
            count = self._multiply(refs, place, names, count)
            plgpu.tcgen05_commit_arrive(refs["sums_full"])

    def _multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any], names: tuple[str, ...], before: Any) -> Any:
        """The products of all tiles for the gradients of keys, of values or of both. before: the number of tiles before these;
        returns it with them."""
        batch, kv_head, kv_block = place
        stages, ahead = self.sizes.stages, len(names) > 1 and pipelined(self.sizes)

        def add(count: Any, name: str) -> None:
            factor, rows = _FACTORS[name]
            slot = lax.rem(count, stages)
            plgpu.barrier_wait(refs[f"{factor}_full"])
            values = refs[f"{rows}_tiles"].at[slot]
            plgpu.tcgen05_mma(refs[f"{name}_sums"], refs[factor], values, accumulate=count > before)
            plgpu.tcgen05_commit_arrive(refs[f"{factor}_read"])
            if name == names[-1]:
                plgpu.tcgen05_commit_arrive(refs["rows_free"].at[slot])

        def add_last(count: Any, name: str) -> None:
            """Those of the tile before."""
            pl.when(count > before)(lambda: add(count - 1, name))

        def multiply(name: str, keys: str, rows: str, slot: Any) -> None:
            columns = refs[f"{rows}_tiles"].at[slot].transpose((1, 0))
            plgpu.tcgen05_mma(refs[name], refs[f"{keys}_tile"], columns, refs[f"{name}_full"], accumulate=False)

        def visit(q_block: Any, count: Any, masked: bool) -> Any:
            del q_block, masked
            slot = lax.rem(count, stages)
            if ahead:
                add_last(count, "value")
            plgpu.barrier_wait(refs["rows_full"].at[slot])
            # Without sums of the values the last gradients of logits, which were waited for, follow from the last logits.
            if "value" in names:
                plgpu.barrier_wait(refs["weights_read"])
            multiply("logits", "key", "query", slot)
            if ahead:
                add_last(count, "key")
            if "key" in names:
                plgpu.barrier_wait(refs["d_logits_read"])
                multiply("d_weights", "value", "d_output", slot)
            for name in () if ahead else names:
                add(count, name)
            return count + 1

        def of_head(number: Any, count: Any) -> Any:
            row = batch, kv_head * self.group + number, kv_block
            return self.table.fold_tiles(refs["schedule"], *row, 0, 1, visit, count)

        count = self._of_heads(of_head, before)
        for name in names if ahead else ():
            add_last(count, name)
        return count

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any) -> None:
        """See BlackwellGradients."""
        batch, kv_head, kv_block = place
        scales = {"key": self.logits.scale, "value": 1.0}
        count = jnp.int32(0)
        for number, names in enumerate(self.turns):
            before, count = count, self._compute(refs, place, which, names, count)
            plgpu.barrier_wait(refs["sums_full"])
            sums = [
                (
                    f"{name}_sums", scales[name], refs[f"{name}_tile"],
                    self.rows(refs[f"d_{name}"], batch, kv_head, kv_block * ROWS, ROWS),
                )
                for name in names
            ]  # fmt: skip
            self.store(refs, which, count > before, sums)
            if number < len(self.turns) - 1:  # the first has written what it stored
                pl.when(which == 0)(lambda: plgpu.barrier_arrive(refs["value_free"]))

    def _compute(
        self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any, names: tuple[str, ...], count: Any
    ) -> Any:
        """The factors of all tiles for the gradients of keys, of values or of both. count: as in `_multiply`."""
        batch, kv_head, kv_block = place
        sizes, first_key, dtype = self.sizes, kv_block * ROWS, refs["key_tile"].dtype
        half = sizes.block_q // COMPUTING
        columns = pl.ds(which * half, half)

        def of_head(number: Any, count: Any) -> Any:
            head = kv_head * self.group + number

            def visit(q_block: Any, count: Any, masked: bool) -> Any:
                slot = lax.rem(count, sizes.stages)
                plgpu.barrier_wait(refs["rows_full"].at[slot])

                def numbers(name: str) -> jax.Array:
                    some = plgpu.load(refs[f"{name}_tiles"].at[slot, columns], layout=_BY_COLUMN)  # type: ignore[call-arg]
                    return along_columns(some, (ROWS, half))

                raw = self.take(refs, "logits", columns)
                first_row = q_block * sizes.block_q + which * half
                part = sizes._replace(block_q=half)
                tile = BlackwellTile(self.logits, refs, (batch, head), first_row, first_key, part, None, by_keys=True)
                x, factor, pull = weigh(tile, raw, masked)
                shifts = numbers("lse")
                x = without_padded_rows(self.logits.static_args.score, x, shifts)
                weights, keep = jnp.exp2(x * factor - shifts), tile.keep()
                plgpu.barrier_wait(refs["logits_read"])
                if names == ("value",):
                    plgpu.commit_smem()  # of the reads of numbers
                if "value" in names:
                    self.give(refs, "weights", tile.dropped(weights, keep).astype(dtype), columns)
                if "key" in names:
                    pulled = pull(weights)
                    d_weights = tile.dropped(self.take(refs, "d_weights", columns), keep)
                    d_x = pulled * (d_weights - numbers("delta"))
                    plgpu.commit_smem()
                    plgpu.barrier_wait(refs["d_weights_read"])
                    self.give(refs, "d_logits", d_x.astype(dtype), columns)
                return count + 1

            return self.table.fold_tiles(refs["schedule"], batch, head, kv_block, 0, 1, visit, count)

        return self._of_heads(of_head, count)

    def _of_heads(self, of_head: Callable[[Any, Any], Any], count: Any) -> Any:
        """of_head(number, count) for the query heads of a kv head."""
        return of_head(0, count) if self.group == 1 else lax.fori_loop(0, self.group, of_head, count)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See MosaicBlock."""
        sizes, (dim, value_dim) = self.sizes, self.dims
        products = plgpu.TMEM((ROWS, sizes.block_q), jnp.float32)
        factors = plgpu.TMEM((ROWS, sizes.block_q), dtype, packed=True)
        sums = {
            "key_sums": plgpu.TMEM((ROWS, dim), jnp.float32),
            "value_sums": plgpu.TMEM((ROWS, value_dim), jnp.float32),
        }
        names = [factor for factor, _ in _FACTORS.values()]
        made = {
            "key_tile": self.tiles(dtype, ROWS, dim),
            "value_tile": self.tiles(dtype, ROWS, value_dim),
            "query_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, dim),
            "d_output_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, value_dim),
            **{f"{name}_tiles": plgpu.SMEM((sizes.stages, sizes.block_q), jnp.float32) for name in BY_ROWS.values()},
            "logits weights": plgpu.RefUnion(products, factors),
            "d_weights d_logits": plgpu.RefUnion(products, factors),
            **({" ".join(sums): plgpu.RefUnion(*sums.values())} if divided(*self.dims) else sums),
            "key_full": plgpu.Barrier(),
            "value_full": plgpu.Barrier(),
            **self.barriers({"rows": 2 * len(BY_ROWS)}, 1, orders_tensor_core=True),
            **self.products("logits", "d_weights"),
            **{f"{name}_full": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True) for name in names},
            **{f"{name}_read": plgpu.Barrier(orders_tensor_core=True) for name in names},
            "sums_full": plgpu.Barrier(orders_tensor_core=True),
            "stored": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True),
        }
        return made | ({"value_free": plgpu.Barrier()} if divided(*self.dims) else {})
