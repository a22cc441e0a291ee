"""The gradients of key and value: a block of threads has keys, and goes through the tiles of rows that see them.

Where tensor memory can't hold both sums, a block goes through its tiles twice: first for those of the values, then for those of
the keys. Values aren't needed the first time: their gradient takes their place in shared memory before they are loaded.

Where values are the first columns of their keys, these have one gradient, in one sum. Of more columns than tensor memory holds, a
block sums a part each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.tile_schedule import Masked
from ...flash.kernel.weigh import weigh
from ...kernels.scores import without_padded_rows
from ...mosaic.kernel.block import Copies, along_columns, in_ring, part_of
from ...mosaic.kernel.mosaic_sizes import Sums
from .backward import BY_ROWS, BlackwellGradients
from .backward_sizes import COMPUTING, pipelined
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

    which: ClassVar[str] = "dkv"
    last_first: ClassVar[bool] = False

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
            plgpu.copy_gmem_to_smem(some, refs[f"{name}_tile"].at[0], refs[f"{name}_full"])

        hold("key")
        count = jnp.int32(0)
        for number, _ in enumerate(self.turns):
            if number and not self.in_key:
                plgpu.barrier_wait(refs["value_free"])
            if number == len(self.turns) - 1 and not self.in_key:
                hold("value")
            count = self._of_heads(of_head, count)
        self.drain(refs, count, ("rows",))

    def multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any]) -> None:
        """See BlackwellGradients."""
        plgpu.barrier_wait(refs["key_full"])
        for factor, _ in _FACTORS.values():
            plgpu.barrier_arrive(refs[f"{factor}_read"])
        count = jnp.int32(0)
        for number, turn in enumerate(self.turns):
            if number:  # the sums of the first time are read
                plgpu.barrier_wait(refs["stored"])
            if "key" in _names(turn) and not self.in_key:
                plgpu.barrier_wait(refs["value_full"])
            count = self._multiply(refs, place, turn, count)
            plgpu.tcgen05_commit_arrive(refs["sums_full"])

    def _multiply(self, refs: dict[str, Any], place: tuple[Any, Any, Any], turn: tuple[Sums, ...], before: Any) -> Any:
        """The products of all tiles for these sums. before: the number of tiles before these; returns it with them."""
        batch, kv_head, kv_block = place
        names = _names(turn)
        stages, ahead = self.sizes.stages, len(names) > 1 and pipelined(self.sizes)
        starts = itertools.accumulate((one.columns for one in turn), initial=0)
        places = [refs["sums"].at[:, pl.ds(at, one.columns)] for at, one in zip(starts, turn, strict=False)]

        def add(count: Any, name: str, q_block: Any) -> None:
            factor, rows = _FACTORS[name]
            slot = in_ring(count, stages)
            plgpu.barrier_wait(refs[f"{factor}_full"])
            tile = self._tile(refs[f"{rows}_tiles"], slot, q_block)
            for place, one in zip(places, turn, strict=True):
                if name in one.of:
                    values = part_of(tile, one)
                    begun = count > before if name == _names((one,))[0] else True
                    plgpu.tcgen05_mma(place, refs[factor], values, accumulate=begun)
            plgpu.tcgen05_commit_arrive(refs[f"{factor}_read"])
            if name == names[-1]:
                plgpu.tcgen05_commit_arrive(refs["rows_free"].at[slot])

        def add_last(count: Any, name: str, q_block: Any) -> None:
            """Those of the tile before."""
            pl.when(count > before)(lambda: add(count - 1, name, q_block))

        def multiply(name: str, keys: str, rows: str, slot: Any, q_block: Any) -> None:
            columns = self._tile(refs[f"{rows}_tiles"], slot, q_block).transpose((1, 0))
            held = refs[f"{'key' if self.in_key else keys}_tile"]
            held = self.columns_of(keys, self._tile(held, 0, q_block))
            plgpu.tcgen05_mma(refs[name], held, columns, refs[f"{name}_full"], accumulate=False)

        def visit(q_block: Any, count: Any) -> Any:
            slot = in_ring(count, stages)
            if ahead:
                add_last(count, "value", q_block)
            plgpu.barrier_wait(refs["rows_full"].at[slot])
            # Without sums of the values the last gradients of logits, which were waited for, follow from the last logits.
            if "value" in names:
                plgpu.barrier_wait(refs["weights_read"])
            multiply("logits", "key", "query", slot, q_block)
            if ahead:
                add_last(count, "key", q_block)
            if "key" in names:
                plgpu.barrier_wait(refs["d_logits_read"])
                multiply("d_weights", "value", "d_output", slot, q_block)
            for name in () if ahead else names:
                add(count, name, q_block)
            return count + 1

        def of_head(number: Any, count: Any) -> Any:
            return self.each_tile(refs, (batch, kv_head * self.group + number, kv_block), visit, count)

        count = self._of_heads(of_head, before)
        for name in names if ahead else ():
            add_last(count, name, 0)
        return count

    def _tile(self, held: Any, number: Any, turn: Any) -> Any:
        """One of the tiles in shared memory; see in_loop."""
        return self.in_loop(held, number, turn) if self.in_key else held.at[number]

    def compute(self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any) -> None:
        """See BlackwellGradients."""
        batch, kv_head, kv_block = place
        scales = {"key": 1.0 if self.in_key else self.logits.scale, "value": 1.0}
        count = jnp.int32(0)
        for number, turn in enumerate(self.turns):
            before, count = count, self._compute(refs, place, which, _names(turn), count)
            plgpu.barrier_wait(refs["sums_full"])
            sums, begin = [], 0
            for one in (_whole(turn),) if self.in_key else turn:
                (name,), columns = one.of, one.columns
                target = self.rows(refs[f"d_{name}"], batch, kv_head, kv_block * ROWS, ROWS)
                held = refs["sums"].at[:, pl.ds(begin, columns)]
                sums.append((held, scales[name], refs[f"{name}_tile"].at[0], part_of(target, one)))
                begin += columns
            if self.in_pieces:
                ((held, scale, _, target),) = sums
                self.store_pieces(refs, which, count > before, held, scale, target)
            else:
                self.store(refs, which, count > before, sums)
            if number < len(self.turns) - 1 and not self.in_key:  # the first has written what it stored
                pl.when(which == 0)(lambda: plgpu.barrier_arrive(refs["value_free"]))

    def _compute(
        self, refs: dict[str, Any], place: tuple[Any, Any, Any], which: Any, names: tuple[str, ...], count: Any
    ) -> Any:
        """The factors of all tiles for the gradients of keys, of values or of both. count: as in `_multiply`."""
        batch, kv_head, kv_block = place
        sizes, first_key, dtype = self.sizes, kv_block * ROWS, refs["key_tile"].dtype
        refs = BlackwellTile.with_numbers(refs, self.logits.static_args.mask, batch, first_key)
        half = sizes.block_q // COMPUTING
        columns = pl.ds(which * half, half)

        def of_head(number: Any, count: Any) -> Any:
            head = kv_head * self.group + number

            def visit(q_block: Any, count: Any, masked: Masked) -> Any:
                slot = in_ring(count, sizes.stages)
                plgpu.barrier_wait(refs["rows_full"].at[slot])

                def numbers(name: str) -> jax.Array:
                    some = plgpu.load(refs[f"{name}_tiles"].at[slot, columns], layout=_BY_COLUMN)  # type: ignore[call-arg]
                    return along_columns(some, (ROWS, half))

                raw = self.take(refs, "logits", columns)
                first_row = q_block * sizes.block_q + which * half
                part = sizes._replace(block_q=half)
                tile = BlackwellTile(
                    self.logits, refs, (batch, head), first_row, first_key, part, None, by_keys=True,
                    by_ids=masked is Masked.BY_IDS,
                )  # fmt: skip
                x, factor, pull = weigh(tile, raw, masked)
                shifts, seen = numbers("lse"), self.seen(refs, tile, masked)

                def weights_of(x: jax.Array) -> jax.Array:
                    x = without_padded_rows(self.logits.static_args.score, x, shifts)
                    return jnp.exp2(x * factor - shifts)

                if seen.everything:
                    weights = weights_of(tile.within(x) if masked else x)
                else:

                    def some() -> jax.Array:
                        return seen.where_cut(0, lambda: weights_of(tile.within(x, seen.span)), lambda: weights_of(x))

                    weights = seen.where_seen(0, some, lambda: jnp.zeros_like(x))
                keep = tile.keep()
                plgpu.barrier_wait(refs["logits_read"])
                if names == ("value",):
                    plgpu.commit_smem()  # of the reads of numbers
                if "value" in names:
                    self.give(refs, "weights", tile.dropped(weights, keep).astype(dtype), columns)
                if "key" in names:
                    pulled = pull(weights)
                    d_weights = tile.dropped(self.take(refs, "d_weights", columns), keep)
                    delta = numbers("delta")

                    def gradients() -> jax.Array:
                        d_x = pulled * (d_weights - delta)
                        # In one sum with the values', which have no such factor.
                        d_x = d_x * self.logits.scale if self.in_key else d_x
                        # Beside dropout's numbers it would take registers.
                        return d_x.astype(dtype) if keep is None else d_x

                    d_x = seen.where_seen(0, gradients, lambda: jnp.zeros(d_weights.shape, dtype))
                    plgpu.commit_smem()
                    plgpu.barrier_wait(refs["d_weights_read"])
                    self.give(refs, "d_logits", d_x.astype(dtype), columns)
                return count + 1

            return self.fold_tiles(refs, (batch, head, kv_block), visit, count)

        return self._of_heads(of_head, count)

    def _of_heads(self, of_head: Callable[[Any, Any], Any], count: Any) -> Any:
        """of_head(number, count) for the query heads of a kv head."""
        return of_head(0, count) if self.group == 1 else lax.fori_loop(0, self.group, of_head, count)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See MosaicBlock."""
        sizes, (dim, value_dim), step = self.sizes, self.dims, self.swizzled(self.sizes.block_q)
        products = plgpu.TMEM((ROWS, sizes.block_q), jnp.float32)
        factors = plgpu.TMEM((ROWS, sizes.block_q), dtype, packed=True)
        names = [factor for factor, _ in _FACTORS.values()]
        made = {
            **{
                f"{name}_tile": self.tiles(dtype, 1, ROWS, columns, step=step)
                for name, columns in zip(self.streams, self.dims, strict=False)
            },
            "query_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, dim, step=step),
            "d_output_tiles": self.tiles(dtype, sizes.stages, sizes.block_q, value_dim, step=step),
            **{f"{name}_tiles": plgpu.SMEM((sizes.stages, sizes.block_q), jnp.float32) for name in BY_ROWS.values()},
            "logits weights": plgpu.RefUnion(products, factors),
            "d_weights d_logits": plgpu.RefUnion(products, factors),
            "sums": plgpu.TMEM((ROWS, self.summed), jnp.float32),
            **{f"{name}_full": plgpu.Barrier() for name in self.streams},
            **self.barriers({"rows": 2 * len(BY_ROWS)}, 1, orders_tensor_core=True),
            **self.products("logits", "d_weights"),
            **{f"{name}_full": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True) for name in names},
            **{f"{name}_read": plgpu.Barrier(orders_tensor_core=True) for name in names},
            "sums_full": plgpu.Barrier(orders_tensor_core=True),
            "stored": plgpu.Barrier(num_arrivals=COMPUTING, orders_tensor_core=True),
        }
        several = len(self.turns) > 1 and not self.in_key
        return made | self.piece_places(dtype) | ({"value_free": plgpu.Barrier()} if several else {})


def _names(turn: tuple[Sums, ...]) -> tuple[str, ...]:
    """The arrays of which gradients are summed, those first whose factor is computed first."""
    return tuple(name for name in _FACTORS if any(name in one.of for one in turn))


def _whole(turn: tuple[Sums, ...]) -> Sums:
    """The sums of neighbouring columns of keys as one."""
    return Sums(("key",), turn[0].first, sum(one.columns for one in turn))
