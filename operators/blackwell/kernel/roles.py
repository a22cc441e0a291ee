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
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...flash.kernel.weigh import weigh
from ...kernels.lse import LN2, LOG2E
from ...mosaic.kernel.block import WARPGROUPS, BlockOfThreads, along_rows, in_ring, one_of
from ...mosaic.kernel.exponentials import exp2
from ...mosaic.kernel.mosaic_sizes import equal_share
from ...mosaic.kernel.seen_parts import ALL_SEEN, SeenParts
from .blackwell_sizes import ROWS, apart, places
from .tile import OUTPUT, TILE

__all__ = ["BlackwellRoles"]

_LOAD, _MULTIPLY = 0, 1  # warps
_CHUNK = 32  # columns of sums that are corrected at once
_SWIZZLED = 64  # columns of an output
# See BlackwellRoles; by the number of warpgroups for softmaxes, and of those that widen.
_REGISTERS = {
    (1, 0): (240, 184, 80), (2, 0): (192, 88, 40), (1, 1): (208, 136, 64, 104), (2, 1): (136, 88, 40, 80),
}  # fmt: skip


class BlackwellRoles(BlockOfThreads):
    """The roles of a block's warpgroups. What it works on, where its tiles are and what they hide is a subclass's to say."""

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
    def chunk(self) -> int:
        """Columns of sums that are corrected at once, for which the warpgroup has registers: a part of all."""
        return _CHUNK

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
        warpgroup = lax.axis_index(WARPGROUPS)
        soft, corrects, helps, *widens = self.registers

        def play(role: Callable[[Any], None]) -> None:
            """What it is told is read by each role for itself, so that none holds what only others need."""
            work = self.work(refs)
            self.used(work, functools.partial(role, work))

        def compute() -> None:  # one program for all of them
            self.take_registers(soft)
            play(lambda work: self.softmax(refs, work, 0 if self.groups == 1 else warpgroup))

        def correct() -> None:
            self.take_registers(corrects)
            play(lambda work: self.correct(refs, work))

        def of_warp(warp: Any) -> None:
            load = functools.partial(play, lambda work: self.load(refs, work))
            multiply = functools.partial(play, lambda work: self.multiply(refs, self.count(refs, work)))
            one_of(warp, [(_LOAD, load), (_MULTIPLY, multiply)])

        def helping() -> None:
            self.take_registers(helps)
            plgpu.warp_map(of_warp)

        def widen(names: tuple[str, ...]) -> None:
            self.take_registers(*widens)
            play(lambda work: self.widen_tiles(refs, work, names))

        roles = [(self.groups, correct), (self.groups + 1, helping)]
        for number, names in enumerate(self.wideners):
            roles.append((self.groups + 2 + number, functools.partial(widen, names)))
        one_of(warpgroup, roles, compute)

    @property
    def held(self) -> int:
        """Columns of queries, the first, that are in tensor memory as `held_columns`."""
        return 0

    def wait_for_queries(self, refs: dict[str, Any], group: int) -> None:
        """Before the first product of a group."""
        plgpu.barrier_wait(refs["query_full"].at[group])

    def take_registers(self, number: int) -> None:
        """So many for each thread of a warpgroup, instead of an equal share."""
        plgpu.set_max_registers(number, action="increase" if number > equal_share(self.warpgroups) else "decrease")

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

    def visit_tiles(self, refs: dict[str, Any], work: Any, visit: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """visit(tile, carry, masked) for all of them; masked: a bool or a Masked."""
        raise NotImplementedError

    def of_rows(self, refs: dict[str, Any], work: Any, group: Any) -> Any:
        """What stays in registers of a group's rows for all their tiles. Default: nothing."""
        del refs, work, group

    def parts(
        self, refs: dict[str, Any], work: Any, group: Any, tile: Any, count: Any, masked: Any, of_rows: Any
    ) -> Sequence[Any]:
        """Parts of equal size of a tile for a group's rows, as `weigh` takes them. count: of the tiles before."""
        raise NotImplementedError

    def seen_parts(self, tiles: Sequence[Any]) -> SeenParts:
        """Of a tile with a mask. Default: of several a warp asks what its rows see."""
        seen: SeenParts = tiles[0].seen_parts(len(tiles), ask=len(tiles) > 1)
        return seen

    def weighed(self, refs: dict[str, Any], count: Any) -> None:
        """When the weights of a tile have been computed. Default: nothing."""

    def shares(self, refs: dict[str, Any], work: Any, share: jax.Array) -> jax.Array:
        """What the sums of rows are multiplied with. share: 1 / total of each. Default: that."""
        del refs, work
        return share

    def start(self, refs: dict[str, Any], work: Any, group: Any) -> tuple[jax.Array, jax.Array]:
        """(peak, total) of rows that have seen no key: a sink is a key without a value."""
        raise NotImplementedError

    def turns(self, work: Any, count: Any) -> tuple[tuple[Any, Any, bool], ...]:
        """(begin, end, whether `clean` may have something to do) of loops over all tiles but the first."""
        del work
        return ((1, count, False),)

    def clean(self, refs: dict[str, Any], work: Any, tile: Any, masked: bool | None) -> None:
        """Before the weights of a tile meet its values; masked: None where it isn't known. Default: nothing."""

    def store(self, refs: dict[str, Any], work: Any, group: Any, name: str, held: Any) -> None:
        """Copy a group's output or lse from shared memory."""
        raise NotImplementedError

    def unrounded(self, refs: dict[str, Any], work: Any, group: Any) -> Any:
        """Where a group's output goes in float32, which shared memory has no place for. Default: nowhere."""
        del refs, work, group

    # -- the warps that load and multiply ----------------------------------------------------------------------------

    def multiply(self, refs: dict[str, Any], count: Any) -> None:
        """Issue the products of all tiles."""

        def product(keys: Any, group: int, at: Any, to: Any) -> None:
            query, rest, full = refs["query_tile"].at[group], keys, refs["logits_full"].at[at]
            if held := self.held:
                first, rest = (keys.at[:, pl.ds(*at)] for at in ((0, held), (held, self.dims[0] - held)))
                plgpu.tcgen05_mma(to, self.held_at(refs, group), first.transpose((1, 0)), accumulate=False)
            plgpu.tcgen05_mma(to, query, rest.transpose((1, 0)), full, accumulate=held > 0)

        def logits(tile: Any, group: int) -> None:
            slot, last = in_ring(tile, self.sizes.stages), group == self.groups - 1
            if group == 0:
                plgpu.barrier_wait(refs["key_full"].at[slot])
            at = self.at(tile, group)
            if not self.apart:
                pl.when(tile >= self.places)(lambda: plgpu.barrier_wait(refs["weights_free"].at[at]))
            self.of_place(refs, "logits", at, functools.partial(product, refs["key_tiles"].at[slot], group, at))
            if last and not self.in_key:
                plgpu.tcgen05_commit_arrive(refs["key_free"].at[slot])

        def values(tile: Any, group: int) -> None:
            slot, last = in_ring(tile, self.sizes.stages), group == self.groups - 1
            at = self.at(tile, group)
            plgpu.barrier_wait(refs["weights_full"].at[at])
            if group == 0 and not self.in_key:
                plgpu.barrier_wait(refs["value_full"].at[slot])
            held = refs[f"{self.streams[-1]}_tiles"].at[slot]

            def add(part: int, weights: Any) -> None:
                some = held.at[:, pl.ds(part * self.columns, self.columns)] if self.in_key else held
                to, full = self.sums_at(refs, group), refs["sums_full"].at[group]
                plgpu.tcgen05_mma(to, weights, some, full, accumulate=tile > 0)

            self.part_of_columns(lambda part: self.of_place(refs, "weights", at, functools.partial(add, part)))
            if last:
                plgpu.tcgen05_commit_arrive(refs[f"{self.streams[-1]}_free"].at[slot])
            # The last tiles' are waited for by nobody.
            pl.when(tile + self.places < count)(lambda: plgpu.tcgen05_commit_arrive(refs["weights_free"].at[at]))

        def next_logits(tile: Any, group: int) -> None:
            pl.when(tile + 1 < count)(lambda: logits(tile + 1, group))

        def own_values(tile: Any, group: int) -> None:
            pl.when(tile >= 0)(lambda: values(tile, group))

        # The next keys take the only place of those whose values are still to be multiplied.
        alone = self.in_key and self.sizes.stages == 1
        ahead = self.places > 1 and not alone

        for group in range(self.groups):
            self.wait_for_queries(refs, group)

        @pl.loop(-1, count)
        def _tile(tile: Any) -> None:
            for group in range(self.groups):
                steps = (next_logits, own_values) if ahead else (own_values, next_logits)
                for step in steps:
                    step(tile, group)

    def at(self, tile: Any, group: Any) -> Any:
        """The number of a tile's place, among those of all groups."""
        return group if self.places == 1 else group * self.places + in_ring(tile, self.places)

    def of_place(self, refs: dict[str, Any], name: str, at: Any, run: Callable[[Any], Any]) -> Any:
        """run(reference) for the logits or the weights of a place.

        Compiled, those of all places are one array, so that one program serves them. To the interpreter's race detection an array
        whose place another one takes is indivisible: there each place has its own.
        """
        if self._separate:
            some = [functools.partial(run, refs[f"{name}{place}"]) for place in range(2)]
            return some[at]() if isinstance(at, int) else lax.cond(at == 0, *some)
        step = self.sizes.block_kv
        return run(refs[name].at[:, pl.ds(at * (step if name == "logits" or self.apart else 2 * step), step)])

    @property
    def _separate(self) -> bool:
        """See of_place."""
        return self.interpret and not self.apart

    def sums_at(self, refs: dict[str, Any], group: Any, first: Any = 0, count: int | None = None) -> Any:
        """The sums of a group's rows: `count` of their columns, or all."""
        return refs["sums"].at[:, pl.ds(group * self.columns + first, count or self.columns)]

    def held_at(self, refs: dict[str, Any], group: Any, first: int = 0, count: int | None = None) -> Any:
        """Columns of a group's queries that are in tensor memory."""
        return refs["held_columns"].at[:, pl.ds(group * self.held + first, count or self.held)]

    # -- those that compute ------------------------------------------------------------------------------------------

    def softmax(self, refs: dict[str, Any], work: Any, group: Any) -> None:
        """The weights of a warpgroup's rows, and their lse."""
        dtype, of_rows = refs["query_tile"].dtype, self.of_rows(refs, work, group)

        def visit(kv_block: Any, carry: Any, masked: Any) -> Any:
            count, peak, total = carry
            at = self.at(count, group)
            plgpu.barrier_wait(refs["logits_full"].at[at])
            whole = self.of_place(refs, "logits", at, _read)
            tiles = self.parts(refs, work, group, kv_block, count, masked, of_rows)
            seen = self.seen_parts(tiles) if masked else ALL_SEEN
            columns, (of_128, written) = tiles[0].shape[1], self.by_products(refs, masked)
            by_products = of_128 * columns // 256 * 2  # a register has two
            xs, highest, factor = list[jax.Array](), list[jax.Array](), 1.0

            def look(number: int, raw: jax.Array) -> tuple[jax.Array, jax.Array]:
                """(the logits of a part, of which those outside of spans are hidden; each row's highest)."""
                nonlocal factor
                tile = tiles[number]
                x, factor, _ = weigh(tile, raw, masked)
                x = seen.where_cut(number, lambda: tile.within(x, seen.of_part(number, columns)), lambda: x)
                return x, x.max(axis=1)

            for number in range(len(tiles)):
                raw = whole[:, number * columns : (number + 1) * columns]
                x, top = seen.where_seen(number, functools.partial(look, number, raw), functools.partial(_unseen, raw))
                xs.append(x)
                highest.append(top)
            new_peak = jnp.maximum(peak, functools.reduce(jnp.maximum, highest) * factor)
            shift = self.shift(new_peak, masked)
            shrink = jnp.exp2(peak - shift)
            refs["shrink"].at[at][...] = shrink
            plgpu.barrier_arrive(refs["shrink_full"].at[at])
            total, shifts = total * shrink, along_rows(shift, (ROWS, columns))

            def weights_of(number: int) -> tuple[jax.Array, jax.Array]:
                """(the weights of a part, their sum)."""
                tile, x = tiles[number], xs[number]
                weights = exp2(x * factor - shifts, by_products)
                return tile.dropped(weights, tile.keep()).astype(dtype), weights.sum(axis=1)

            # The last part first: otherwise the compiler copies its logits away from where the first weights go.
            for number in reversed(range(len(xs))):
                x = xs[number]
                weigh_part = functools.partial(weights_of, number)
                part, some = seen.where_seen(number, weigh_part, functools.partial(_no_weights, x.shape, dtype))
                total = total + some
                if number == len(xs) - 1 and self.apart:
                    pl.when(count >= self.places)(lambda: plgpu.barrier_wait(refs["weights_free"].at[at]))
                self.of_place(refs, "weights", at, functools.partial(_write, number, part, written))
            plgpu.commit_tmem()
            self.weighed(refs, count)
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

    def shift(self, peak: jax.Array, masked: Any) -> jax.Array:
        """What is subtracted from the logits of rows whose highest one is this. Default: the same, as rows start at LOWEST."""
        del masked
        return peak

    def by_products(self, refs: dict[str, Any], masked: Any) -> tuple[int, int]:
        """(how many of 128 exponentials are computed by products, at most how many columns of weights are written at once). See
        exponentials.py."""
        del refs, masked
        return 0, 128

    def correct(self, refs: dict[str, Any], work: Any) -> None:
        """Shrink the sums where a row's maximum has grown; after the last tile write the output."""
        count, chunk = self.count(refs, work), self.chunk

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
                shrink = plgpu.load(refs["shrink"].at[at], optimized=False)  # type: ignore[call-arg] # of jax 0.10
                shrink = plgpu.layout_cast(along_rows(shrink, (ROWS, chunk)), TILE)
                plgpu.barrier_wait(refs["sums_full"].at[group])
                for first in range(0, self.columns, chunk):
                    ref = self.sums_at(refs, group, first, chunk)
                    sums = plgpu.async_load_tmem(ref)
                    plgpu.wait_load_tmem()
                    plgpu.async_store_tmem(ref, sums * shrink)
                plgpu.commit_tmem()
                plgpu.barrier_arrive(refs["weights_full"].at[at])

        for begin, end, masked in self.turns(work, count):
            pl.loop(begin, end)(functools.partial(shrink_sums, masked=masked))
        _each(self.groups, lambda group: self.write(refs, work, group, count))
        plgpu.wait_smem_to_gmem(0)

    def write(self, refs: dict[str, Any], work: Any, group: Any, count: Any) -> None:
        """A group's output, of so many tiles."""
        plgpu.barrier_wait(refs["totals_full"].at[group])
        total = plgpu.load(refs["totals"].at[group], layout=OUTPUT.reduce(1), optimized=False)  # type: ignore[call-arg]
        # Without tiles there are no sums, whatever the total: a sink's.
        seen = (total > 0) & (count > 0)
        share = self.shares(refs, work, jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0))
        step = math.gcd(_SWIZZLED, self.columns)
        chunk = min(self.chunk, step)
        shares = plgpu.layout_cast(along_rows(share, (ROWS, chunk)), OUTPUT)
        # Without tiles the queries, whose place the output may take, can still be on their way.
        either = (functools.partial(plgpu.barrier_wait, refs[f"{name}_full"].at[group]) for name in ("query", "sums"))
        lax.cond(count == 0, *either)
        output, unrounded = refs.get("output_tile", refs["query_tile"]).at[group], self.unrounded(refs, work, group)

        def part(number: Any) -> None:
            """Columns that are swizzled together, of which fewer are in registers at once."""
            parts = list[jax.Array]()
            for first in range(0, step, chunk):
                sums = plgpu.async_load_tmem(self.sums_at(refs, group, number * step + first, chunk))
                plgpu.wait_load_tmem()
                made = jnp.where(shares > 0, sums * shares, 0.0)
                if unrounded is None:
                    parts.append(made.astype(output.dtype))
                else:
                    columns = pl.ds(number * step + first, chunk)
                    plgpu.store(unrounded.at[:, columns], made, optimized=False)  # type: ignore[attr-defined] # of jax 0.10
            if unrounded is None:
                output.at[:, pl.ds(number * step, step)][...] = jnp.concatenate(parts, axis=1)

        _each(self.columns // step, part)
        if unrounded is None:
            plgpu.commit_smem()
            self.store(refs, work, group, "output", output)

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
        made["sums"] = plgpu.TMEM((ROWS, groups * self.columns), jnp.float32)
        keys = sizes.block_kv if self._separate else number * sizes.block_kv
        # In the place of logits only the first half of the columns has weights.
        halves = 1 if self.apart or self._separate else 2
        logits, weights = plgpu.TMEM((ROWS, keys), jnp.float32), plgpu.TMEM((ROWS, halves * keys), dtype, packed=True)
        if self.apart:
            return made | {"logits": logits, "weights": weights}
        places = range(number) if self._separate else ("",)
        return made | {f"logits{place} weights{place}": plgpu.RefUnion(logits, weights) for place in places}


def _read(logits: Any) -> jax.Array:
    """The products of a tile."""
    raw: jax.Array = plgpu.async_load_tmem(logits, layout=TILE)
    plgpu.wait_load_tmem()
    return raw


def _unseen(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what nobody reads, each row's highest logit) of a part that no row sees."""
    return x, jnp.full((ROWS,), -jnp.inf, jnp.float32)


def _no_weights(shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(weights of a part that no row sees, their sum)."""
    return jnp.zeros(shape, dtype), jnp.zeros((ROWS,), jnp.float32)


def _write(number: int, part: jax.Array, written: int, weights: Any) -> None:
    """The weights of a part of a tile, so many columns at once; the last first, as the parts."""
    columns = part.shape[1]
    step = min(written, columns)
    for first in reversed(range(0, columns, step)):
        plgpu.async_store_tmem(weights.at[:, pl.ds(number * columns + first, step)], part[:, first : first + step])


def _each(count: int, run: Callable[[Any], None]) -> None:
    """run(number) for so many numbers, in one program."""
    if count == 1:
        run(0)
    else:
        pl.loop(0, count)(run)
