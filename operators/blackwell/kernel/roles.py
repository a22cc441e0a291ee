"""The roles of warpgroups in a forward pass: online softmax over tiles of keys, with logits and sums in tensor memory.

One or two warpgroups compute softmaxes, each of 128 rows of its own, and read the logits' products from tensor memory and write
the weights there. Another corrects the sums when a row's maximum has grown, and writes the output. Of the next one, a warp loads
by TMA and another issues the products: the softmax of one tile runs beside the products of another. Where keys or values have 8
bits a number, a last one widens them.

Where tensor memory is too small for logits and weights, the weights of a tile lie where its logits were, and the next tile's
logits are written there once their product has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.weigh import weigh
from ...kernels.lse import LN2, LOG2E
from ...mosaic.kernel.block import WARPGROUPS, BlockOfThreads, along_rows
from ...mosaic.kernel.exponentials import exp2
from .blackwell_sizes import PART, REGISTERS, ROWS, THREADS, apart, places
from .tile import BY_ROW, OUTPUT, TILE

__all__ = ["BlackwellRoles"]

_LOAD, _MULTIPLY = 0, 1  # warps
_CHUNK = 32  # columns of sums that are corrected at once
# See BlackwellRoles; by the number of warpgroups for softmaxes, and of those that widen.
_REGISTERS = {
    (1, 0): (240, 184, 80), (2, 0): (192, 88, 40), (1, 1): (208, 136, 64, 104), (2, 1): (136, 88, 40, 80),
}  # fmt: skip


class BlackwellRoles(BlockOfThreads):
    """The roles of a block's warpgroups. What it works on, where its tiles are and what they hide is a subclass's to say."""

    chunk: ClassVar[int] = _CHUNK

    @property
    def registers(self) -> tuple[int, ...]:
        """Per thread of warpgroups for softmaxes, for the sums, for loads and products, and for what is widened. A block begins
        with an equal share of the multiprocessor's registers in units of 8; what some give up is all that others can take."""
        return _REGISTERS[self.groups, len(self.wideners)]

    @property
    def groups(self) -> int:
        """Warpgroups for softmaxes, with 128 rows each."""
        return self.sizes.block_q // ROWS

    @property
    def wideners(self) -> tuple[tuple[str, ...], ...]:
        """What each of further warpgroups widens, of keys and values with 8 bits a number."""
        return ()

    @property
    def warpgroups(self) -> int:
        """See MosaicBlock."""
        return self.groups + 2 + len(self.wideners)

    @property
    def places(self) -> int:
        """Places for the logits of a warpgroup's rows."""
        return places(self.sizes)

    @property
    def apart(self) -> bool:
        """Whether weights don't lie where their logits were."""
        return apart(self.sizes, self.columns)

    @property
    def columns(self) -> int:
        """Of the output, whose sums a block has. Default: all."""
        return self.dims[1]

    def part_of_columns(self, run: Callable[[int], None]) -> None:
        """run(number) for the part of the output's columns that is the block's. Default: the first."""
        run(0)

    def __call__(self, refs: dict[str, Any]) -> None:
        warpgroup, work = lax.axis_index(WARPGROUPS), self.work(refs)
        soft, corrects, helps, *widens = self.registers
        for group in range(self.groups):

            @pl.when(warpgroup == group)
            def _softmax(group: int = group) -> None:
                self.take_registers(soft)
                self.used(work, lambda: self.softmax(refs, work, group))

        @pl.when(warpgroup == self.groups)
        def _correct() -> None:
            self.take_registers(corrects)
            self.used(work, lambda: self.correct(refs, work))

        @pl.when(warpgroup == self.groups + 1)
        def _help() -> None:
            self.take_registers(helps)

            @plgpu.warp_map
            def _warps(warp: Any) -> None:
                pl.when(warp == _LOAD)(lambda: self.used(work, lambda: self.load(refs, work)))
                pl.when(warp == _MULTIPLY)(lambda: self.used(work, lambda: self.multiply(refs, self.count(refs, work))))

        for number, names in enumerate(self.wideners):

            @pl.when(warpgroup == self.groups + 2 + number)
            def _widen(names: tuple[str, ...] = names) -> None:
                self.take_registers(*widens)
                self.used(work, lambda: self.widen_tiles(refs, work, names))

    @property
    def held(self) -> int:
        """Columns of queries, the first, that are in tensor memory as `query_held<group>`."""
        return 0

    def wait_for_queries(self, refs: dict[str, Any], group: int) -> None:
        """Before the first product of a group."""
        plgpu.barrier_wait(refs["query_full"].at[group])

    def take_registers(self, number: int) -> None:
        """So many for each thread of a warpgroup, instead of an equal share."""
        share = REGISTERS // (THREADS * self.warpgroups) // 8 * 8
        plgpu.set_max_registers(number, action="increase" if number > share else "decrease")

    # -- what a block works on ---------------------------------------------------------------------------------------

    def work(self, refs: dict[str, Any]) -> Any:
        """What these methods are told of a block."""
        raise NotImplementedError

    def used(self, work: Any, role: Callable[[], None]) -> None:
        """Play a role, if the block has work."""
        del work
        role()

    def load(self, refs: dict[str, Any], work: Any) -> None:
        """The queries, and the tiles of keys and values."""
        raise NotImplementedError

    def widen_tiles(self, refs: dict[str, Any], work: Any, names: tuple[str, ...]) -> None:
        """What a warpgroup does that widens numbers of 8 bits."""
        raise NotImplementedError

    def count(self, refs: dict[str, Any], work: Any) -> Any:
        """The number of the block's tiles."""
        raise NotImplementedError

    def visit_tiles(self, refs: dict[str, Any], work: Any, visit: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
        """visit(tile, carry, masked) for all of them."""
        raise NotImplementedError

    def of_rows(self, refs: dict[str, Any], work: Any, group: int) -> Any:
        """What stays in registers of a group's rows for all their tiles. Default: nothing."""
        del refs, work, group

    def parts(
        self, refs: dict[str, Any], work: Any, group: int, tile: Any, count: Any, masked: bool, of_rows: Any
    ) -> Sequence[Any]:
        """Of a group's rows and a tile's keys, PART of these each, as `weigh` takes them. count: of the tiles before."""
        raise NotImplementedError

    def weighed(self, refs: dict[str, Any], count: Any) -> None:
        """When the weights of a tile have been computed. Default: nothing."""

    def shares(self, refs: dict[str, Any], work: Any, share: jax.Array) -> jax.Array:
        """What the sums of rows are multiplied with. share: 1 / total of each. Default: that."""
        del refs, work
        return share

    def start(self, refs: dict[str, Any], work: Any, group: int) -> tuple[jax.Array, jax.Array]:
        """(peak, total) of rows that have seen no key: a sink is a key without a value."""
        raise NotImplementedError

    def turns(self, work: Any, count: Any) -> tuple[tuple[Any, Any, bool], ...]:
        """(begin, end, whether `clean` may have something to do) of loops over all tiles but the first."""
        del work
        return ((1, count, False),)

    def clean(self, refs: dict[str, Any], work: Any, tile: Any, masked: bool | None) -> None:
        """Before the weights of a tile meet its values; masked: None where it isn't known. Default: nothing."""

    def store(self, refs: dict[str, Any], work: Any, group: int, name: str, held: Any) -> None:
        """Copy a group's output or lse from shared memory."""
        raise NotImplementedError

    def unrounded(self, refs: dict[str, Any], work: Any, group: int) -> Any:
        """Where a group's output goes in float32, which shared memory has no place for. Default: nowhere."""
        del refs, work, group

    # -- the warps that load and multiply ----------------------------------------------------------------------------

    def multiply(self, refs: dict[str, Any], count: Any) -> None:
        """Issue the products of all tiles."""

        def product(keys: Any, group: int, at: Any, where: int) -> None:
            to, full = refs[f"logits{group}{where}"], refs["logits_full"].at[at]
            query, rest = refs["query_tile"].at[group], keys
            if held := self.held:
                first, rest = (keys.at[:, pl.ds(*at)] for at in ((0, held), (held, self.dims[0] - held)))
                plgpu.tcgen05_mma(to, refs[f"query_held{group}"], first.transpose((1, 0)), accumulate=False)
            plgpu.tcgen05_mma(to, query, rest.transpose((1, 0)), full, accumulate=held > 0)

        def logits(tile: Any, group: int) -> None:
            slot, last = lax.rem(tile, self.sizes.stages), group == self.groups - 1
            if group == 0:
                plgpu.barrier_wait(refs["key_full"].at[slot])
            at = self.at(tile, group)
            if not self.apart:
                pl.when(tile >= self.places)(lambda: plgpu.barrier_wait(refs["weights_free"].at[at]))
            self.of_place(tile, functools.partial(product, refs["key_tiles"].at[slot], group, at))
            if last and not self.in_key:
                plgpu.tcgen05_commit_arrive(refs["key_free"].at[slot])

        def values(tile: Any, group: int) -> None:
            slot, last = lax.rem(tile, self.sizes.stages), group == self.groups - 1
            plgpu.barrier_wait(refs["weights_full"].at[self.at(tile, group)])
            if group == 0 and not self.in_key:
                plgpu.barrier_wait(refs["value_full"].at[slot])
            held = refs[f"{self.streams[-1]}_tiles"].at[slot]

            def add(where: int, part: int) -> None:
                some = held.at[:, pl.ds(part * self.columns, self.columns)] if self.in_key else held
                plgpu.tcgen05_mma(
                    refs[f"sums{group}"], refs[f"weights{group}{where}"], some,
                    refs["sums_full"].at[group], accumulate=tile > 0,
                )  # fmt: skip

            self.part_of_columns(lambda part: self.of_place(tile, lambda where: add(where, part)))
            if last:
                plgpu.tcgen05_commit_arrive(refs[f"{self.streams[-1]}_free"].at[slot])
            at = self.at(tile, group)  # the last tiles' are waited for by nobody
            pl.when(tile + self.places < count)(lambda: plgpu.tcgen05_commit_arrive(refs["weights_free"].at[at]))

        def next_logits(tile: Any, group: int) -> None:
            pl.when(tile + 1 < count)(lambda: logits(tile + 1, group))

        @pl.when(count > 0)
        def _first() -> None:
            for group in range(self.groups):
                self.wait_for_queries(refs, group)
                logits(jnp.int32(0), group)

        # The next keys take the only place of those whose values are still to be multiplied.
        alone = self.in_key and self.sizes.stages == 1
        ahead = self.places > 1 and not alone

        @pl.loop(0, count)
        def _tile(tile: Any) -> None:
            for group in range(self.groups):
                steps = (next_logits, values) if ahead else (values, next_logits)
                for step in steps:
                    step(tile, group)

        @pl.when(count == 0)
        def _none() -> None:
            for group in range(self.groups):
                self.wait_for_queries(refs, group)

    def at(self, tile: Any, group: int) -> Any:
        """The number of the barrier of a tile's place."""
        return group if self.places == 1 else group * self.places + lax.rem(tile, self.places)

    def of_place(self, tile: Any, run: Callable[[int], None]) -> None:
        """run(number) for the place of a tile: tensor memory isn't indexed by traced numbers."""
        for number in range(self.places):
            if self.places == 1:
                run(number)
            else:
                pl.when(lax.rem(tile, self.places) == number)(functools.partial(run, number))

    # -- those that compute ------------------------------------------------------------------------------------------

    def softmax(self, refs: dict[str, Any], work: Any, group: int) -> None:
        """The weights of a warpgroup's rows, and their lse."""
        dtype, of_rows, by_products = refs["query_tile"].dtype, self.of_rows(refs, work, group), self.by_products(refs)

        def visit(kv_block: Any, carry: Any, masked: bool) -> Any:
            count, peak, total = carry
            at = self.at(count, group)
            plgpu.barrier_wait(refs["logits_full"].at[at])
            raw = self._read(refs, count, group)
            tiles, xs, factor = self.parts(refs, work, group, kv_block, count, masked, of_rows), [], 1.0
            for tile, one in zip(tiles, raw, strict=True):
                x, factor, _ = weigh(tile, one, masked)
                xs.append(x)
            highest = xs[0].max(axis=1)
            for x in xs[1:]:
                highest = jnp.maximum(highest, x.max(axis=1))
            new_peak = jnp.maximum(peak, highest * factor)
            # A row without visible keys so far keeps shift 0: its exponentials are 0, not NaN.
            hidden = masked or "bias" in refs or self.logits.static_args.score is not None
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak) if hidden else new_peak
            shrink = jnp.exp2(peak - shift)
            refs["shrink"].at[at][...] = shrink
            plgpu.barrier_arrive(refs["shrink_full"].at[at])
            total = total * shrink
            written = []
            for tile, x in zip(tiles, xs, strict=True):
                weights = exp2(x * factor - along_rows(shift, x.shape), 0 if masked else by_products)
                total = total + weights.sum(axis=1)
                written.append(tile.dropped(weights, tile.keep()).astype(dtype))
            self.weighed(refs, count)
            if self.apart:
                pl.when(count >= self.places)(lambda: plgpu.barrier_wait(refs["weights_free"].at[at]))
            self._write(refs, count, group, written)
            plgpu.barrier_arrive(refs["weights_full"].at[at])
            return count + 1, new_peak, total

        carry = (jnp.int32(0), *self.start(refs, work, group))
        _, peak, total = self.visit_tiles(refs, work, visit, carry)
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        refs["totals"].at[group][...] = total
        refs["lse_rows"].at[group][...] = jnp.where(visible, (peak + jnp.log(safe) * LOG2E) * LN2, -jnp.inf)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["totals_full"].at[group])
        self.store(refs, work, group, "lse", refs["lse_rows"].at[group])
        plgpu.wait_smem_to_gmem(0)

    def by_products(self, refs: dict[str, Any]) -> int:
        """How many of a part's exponentials are computed by products, in tiles without a mask; see exponentials.py."""
        del refs
        return 0

    def _read(self, refs: dict[str, Any], count: Any, group: int) -> list[jax.Array]:
        """The products of a tile, part by part."""
        parts = range(0, self.sizes.block_kv, PART)

        def read(where: int) -> list[jax.Array]:
            ref = refs[f"logits{group}{where}"]
            made = [plgpu.async_load_tmem(ref.at[:, pl.ds(first, PART)], layout=TILE) for first in parts]
            plgpu.wait_load_tmem()
            return made

        if self.places == 1:
            return read(0)
        made: list[jax.Array] = lax.cond(lax.rem(count, 2) == 0, lambda: read(0), lambda: read(1))
        return made

    def _write(self, refs: dict[str, Any], count: Any, group: int, parts: list[jax.Array]) -> None:
        """The weights of a tile."""

        def write(where: int) -> None:
            ref = refs[f"weights{group}{where}"]
            for number, part in enumerate(parts):
                plgpu.async_store_tmem(ref.at[:, pl.ds(number * PART, PART)], part)
            plgpu.commit_tmem()

        self.of_place(count, write)

    def correct(self, refs: dict[str, Any], work: Any) -> None:
        """Shrink the sums where a row's maximum has grown; after the last tile write the output."""
        count = self.count(refs, work)

        @pl.when(count > 0)
        def _first() -> None:  # there are no sums yet
            for group in range(self.groups):
                at = self.at(jnp.int32(0), group)
                plgpu.barrier_wait(refs["shrink_full"].at[at])
                if group == 0:
                    self.clean(refs, work, jnp.int32(0), None)
                plgpu.barrier_arrive(refs["weights_full"].at[at])

        def shrink_sums(tile: Any, masked: bool) -> None:
            for group in range(self.groups):
                at = self.at(tile, group)
                plgpu.barrier_wait(refs["shrink_full"].at[at])
                if group == 0:
                    self.clean(refs, work, tile, masked)
                shrink = plgpu.load(refs["shrink"].at[at], layout=BY_ROW, optimized=False)  # type: ignore[call-arg]
                plgpu.barrier_wait(refs["sums_full"].at[group])
                for first in range(0, self.columns, self.chunk):
                    ref = refs[f"sums{group}"].at[:, pl.ds(first, self.chunk)]
                    sums = plgpu.async_load_tmem(ref, layout=TILE)
                    plgpu.wait_load_tmem()
                    plgpu.async_store_tmem(ref, sums * along_rows(shrink, sums.shape))
                plgpu.commit_tmem()
                plgpu.barrier_arrive(refs["weights_full"].at[at])

        for begin, end, masked in self.turns(work, count):
            pl.loop(begin, end)(functools.partial(shrink_sums, masked=masked))
        for group in range(self.groups):
            plgpu.barrier_wait(refs["totals_full"].at[group])
            total = plgpu.load(refs["totals"].at[group], layout=OUTPUT.reduce(1), optimized=False)  # type: ignore[call-arg]
            # Without tiles there are no sums, whatever the total: a sink's.
            seen = (total > 0) & (count > 0)
            share = self.shares(refs, work, jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0))
            pl.when(count > 0)(functools.partial(plgpu.barrier_wait, refs["sums_full"].at[group]))
            step = self.chunk if self.columns % (2 * self.chunk) else 2 * self.chunk
            output, unrounded = refs.get("output_tile", refs["query_tile"]).at[group], self.unrounded(refs, work, group)
            for first in range(0, self.columns, step):
                columns = pl.ds(first, step)
                sums = plgpu.async_load_tmem(refs[f"sums{group}"].at[:, columns], layout=OUTPUT)
                shares = along_rows(share, sums.shape)
                made = jnp.where(shares > 0, sums * shares, 0.0)
                if unrounded is None:
                    output.at[:, columns][...] = made.astype(output.dtype)
                else:
                    plgpu.store(unrounded.at[:, columns], made, optimized=False)  # type: ignore[attr-defined] # of jax 0.10
            plgpu.wait_load_tmem()
            if unrounded is None:
                plgpu.commit_smem()
                self.store(refs, work, group, "output", output)
        plgpu.wait_smem_to_gmem(0)

    # -- places and barriers -----------------------------------------------------------------------------------------

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """See MosaicBlock."""
        sizes, dim, groups, number = self.sizes, self.dims[0], self.groups, self.groups * self.places
        query = self.tiles(dtype, groups, ROWS, dim - self.held)
        made: dict[str, Any] = {"query_tile": query}
        if self.columns != dim - self.held:
            made = {"query_tile output_tile": plgpu.RefUnion(query, self.tiles(dtype, groups, ROWS, self.columns))}
        for name, columns in zip(self.streams, self.dims, strict=False):
            made[f"{name}_tiles"] = self.tiles(dtype, sizes.stages, sizes.block_kv, columns, step=self.step(name))
        made |= {
            "shrink": plgpu.SMEM((number, ROWS), jnp.float32),
            "totals": plgpu.SMEM((groups, ROWS), jnp.float32),
            "lse_rows": plgpu.SMEM((groups, ROWS), jnp.float32),
            "query_full": plgpu.Barrier(num_barriers=groups),
            "logits_full": plgpu.Barrier(num_barriers=number, orders_tensor_core=True),
            "weights_full": plgpu.Barrier(num_arrivals=2, num_barriers=number, orders_tensor_core=True),
            "weights_free": plgpu.Barrier(num_barriers=number, orders_tensor_core=True),
            "sums_full": plgpu.Barrier(num_barriers=groups, orders_tensor_core=True),
            "shrink_full": plgpu.Barrier(num_barriers=number),
            "totals_full": plgpu.Barrier(num_barriers=groups),
            **self.barriers(dict.fromkeys(self.streams, self.copies), 1, orders_tensor_core=True),
        }
        for group in range(groups):
            made[f"sums{group}"] = plgpu.TMEM((ROWS, self.columns), jnp.float32)
            for place in range(self.places):
                names, shape = (f"logits{group}{place}", f"weights{group}{place}"), (ROWS, sizes.block_kv)
                both = plgpu.TMEM(shape, jnp.float32), plgpu.TMEM(shape, dtype, packed=True)
                made |= dict(zip(names, both, strict=True)) if self.apart else {" ".join(names): plgpu.RefUnion(*both)}
        return made
