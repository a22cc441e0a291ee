"""A block of threads over pages: one warpgroup loads pages of keys and values by TMA, the others compute. Of quantised pages two
load, keys and values, and widen what has come.

Its rows are tokens of one sequence with the query heads of a kv head, one after the other. The page table says where the next
tile's keys are; each page is a copy of its own. First come the tiles of which every row sees every key, then the others: there
the warpgroup that loads writes zeros over values that nobody may see, because a weight of 0 times what a freed page holds may be
NaN. Both sides go through the same tiles in the same order. A place in shared memory has a barrier for each thing that happens to
it: filled, cleaned, free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....page_layouts import PageLayout
from ....flash.kernel.weigh import weigh
from ....hopper.kernel.hopper_sizes import ROWS
from ....hopper.kernel.tensor_cores import tensor_cores
from ....hopper.kernel.tile import BY_COLUMN, BY_ROW, TILE
from ....mosaic.kernel.block import BLOCKS, WARPGROUPS
from ....mosaic.kernel.mosaic_sizes import swizzled_columns
from ...block_words import seen_by_words
from ...lse import LN2, LOG2E
from ...tile_mask import TileLogits
from ..paged_mask import BITS
from .page_tile import PageTile, along_rows, by_row, of_rows
from .page_tiles import PageTiles
from .page_units import FIELDS

__all__ = ["PagesForward"]

# Registers per thread of a warpgroup that loads and of one that computes, by how many there are of each: what some give up is all
# that others can take. With one of each they stay as compiled. One that widens quantised numbers needs more.
_REGISTERS = {(1, 2): (56, 224), (2, 1): (120, 240), (2, 2): (56, 200)}
_REGISTERS_OF_LATENTS = (56, 224)  # quantised ones
_REGISTERS_OF_PARTS = (40, 232)  # where two that compute have half of a row's columns each
_AT_ONCE = 128  # columns up to which numbers are widened without a loop: more would take registers that aren't there
_WIDENED = plgpu.Layout.WGMMA_UPCAST_2X  # how a warpgroup holds numbers while it widens them


class Unit(NamedTuple):
    """A unit's numbers, int32; see page_units.FIELDS."""

    sequence: Any
    tile_of_rows: Any
    begin: Any
    full: Any
    after_full: Any
    end: Any
    first: Any
    first_key: Any
    end_key: Any
    first_draft: Any
    own: Any
    token: Any

    @property
    def whole(self) -> Any:
        """Tiles of which every row sees every key."""
        return self.after_full - self.full

    @property
    def tiles(self) -> Any:
        """All of them."""
        return self.end - self.begin

    def tile(self, number: Any, masked: bool | None) -> Any:
        """The number-th of these tiles in the order in which they are visited: whole ones, those before them, those after.
        masked: whether it isn't a whole one; None where that isn't known."""
        if masked is False:
            return self.full + number
        at = self.begin + number - self.whole
        other = jnp.where(at < self.full, at, at + self.whole)
        return other if masked else jnp.where(number < self.whole, self.full + number, other)


@dataclass(frozen=True)
class PagesForward:
    """Blocks are numbered (unit, part of the heads), the head fastest. A unit with a key of its own writes it to its page before
    it loads that page; no other block has the page's row. page: tokens. group: query heads in a token's rows;
    head_tiles: parts of the query heads of a kv head. value_dim: padded. latent: values are the first columns of their keys."""

    tiles: PageTiles
    logits: TileLogits
    form: PageLayout
    page: int
    pages: int
    heads: int
    head_tiles: int
    dims: tuple[int, int]  # padded
    first_value: int  # the column of a row at which its value begins
    rows: int  # of a group that are loaded and written; what others hold is never seen
    latent: bool
    interpret: bool
    own: tuple[
        tuple[int, int], ...
    ] = ()  # of what a token's key and its value have in a page: the first column, how many

    def __call__(self, refs: dict[str, Any]) -> None:
        block, warpgroup = lax.axis_index(BLOCKS), lax.axis_index(WARPGROUPS)
        head, number = lax.rem(block, self.heads), lax.div(block, self.heads)
        unit = Unit(*(refs["units"][number, field] for field in range(len(FIELDS))))

        registers = _REGISTERS.get((self.loaders, self.tiles.consumers))
        if self.tiles.parts > 1 and not self.quantised:
            registers = _REGISTERS_OF_PARTS
        if self.quantised and self.latent:
            registers = _REGISTERS_OF_LATENTS if self.tiles.consumers > 1 else None

        @pl.when(warpgroup < self.tiles.consumers)
        def _compute() -> None:
            if registers is not None:
                plgpu.set_max_registers(registers[1], action="increase")
            pl.when(unit.sequence >= 0)(lambda: self._compute(refs, unit, number, head, warpgroup))

        for loader in range(self.loaders):

            @pl.when(warpgroup == self.tiles.consumers + loader)
            def _load(name: str = self.streams[loader]) -> None:
                if registers is not None:
                    plgpu.set_max_registers(registers[0], action="decrease")
                load = functools.partial(self._load_and_widen, name) if self.quantised else self._load
                pl.when(unit.sequence >= 0)(lambda: load(refs, unit, head))

    @property
    def streams(self) -> tuple[str, ...]:
        """What is loaded for a tile; the last has the values."""
        return ("key",) if self.latent else ("key", "value")

    @property
    def value_step(self) -> int:
        """Columns of a value that are swizzled together, of those of a key too where they are the first of them."""
        of_part = self.dims[1] // self.tiles.parts
        return swizzled_columns(of_part, *(self.dims if self.latent else ()))

    @property
    def quantised(self) -> bool:
        """Whether pages hold numbers of 8 bits, which the warpgroup that loads widens."""
        return self.tiles.stored > 0

    @property
    def loaders(self) -> int:
        """Warpgroups that load: of quantised pages one for each of what is widened."""
        return len(self.streams) if self.quantised else 1

    def step(self, stream: str) -> int:
        """Columns of a tile of this that are swizzled together."""
        return self.value_step if stream == self.streams[-1] else swizzled_columns(self.dims[0])

    @property
    def copies(self) -> int:
        """Of a tile: its pages, or a part of one."""
        return max(1, self.tiles.block_kv // self.page)

    def _visit(self, unit: Unit, visit: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
        """visit(number, carry, masked) for all tiles."""
        for begin, end, masked in ((0, unit.whole, False), (unit.whole, unit.tiles, True)):

            def turn(number: Any, carry: Any, masked: bool = masked) -> Any:
                return visit(number, carry, masked)

            carry = lax.fori_loop(jnp.int32(begin), end, turn, carry)
        return carry

    # -- pages -------------------------------------------------------------------------------------------------------

    def _page(self, refs: dict[str, Any], unit: Unit, tile: Any, copy: int) -> tuple[Any, Any, Any]:
        """(a page of a tile, the row there at which the tile's keys begin, whether any of its keys is seen)."""
        table, size = refs["table"], self.tiles.block_kv
        key = tile * size + copy * min(size, self.page)
        row: Any = 0
        number = tile * self.copies + copy
        if size < self.page:
            number, part = lax.div(tile, jnp.int32(self.page // size)), lax.rem(tile, jnp.int32(self.page // size))
            row = part * size
        # Tiles may go beyond the table's width.
        page = table[unit.sequence, jnp.minimum(number, table.shape[1] - 1)]
        there = (page >= 0) & (page < self.pages) & (key < unit.end_key) & (key + min(size, self.page) > unit.first_key)
        return page, row, there

    def _there(self, refs: dict[str, Any], unit: Unit, tile: Any) -> Any:
        """A bit for each page of a tile: whether its keys are seen."""
        bits = (
            jnp.where(self._page(refs, unit, tile, copy)[2], jnp.int32(1 << copy), jnp.int32(0))
            for copy in range(self.copies)
        )
        return reduce(jnp.bitwise_or, bits)

    # -- the warpgroup that loads ------------------------------------------------------------------------------------

    def _load_queries(self, refs: dict[str, Any], unit: Unit, head: Any) -> None:
        for group in range(self.tiles.row_groups):
            rows = refs["query"].at[unit.tile_of_rows, head, pl.ds(group * ROWS, self.rows)]
            target = refs["query_tile"].at[group, pl.ds(0, self.rows)]
            plgpu.copy_gmem_to_smem(rows, target, refs["query_full"].at[group])

    def _load(self, refs: dict[str, Any], unit: Unit, head: Any) -> None:
        """The rows' queries, and every tile into the next place, once that is free."""
        self._write_own(refs, unit, head, self.streams)
        self._load_queries(refs, unit, head)
        stages = self.tiles.stages

        def load(number: Any, carry: Any, masked: bool) -> Any:
            slot, tile = lax.rem(number, jnp.int32(stages)), unit.tile(number, masked)
            for name in self.streams:

                @pl.when(number >= stages)
                def _wait(name: str = name) -> None:
                    plgpu.barrier_wait(refs[f"{name}_free"].at[slot])

                dirty = masked and name == self.streams[-1]
                full = refs[f"{name}_{'raw' if dirty else 'full'}"].at[slot]
                self._copy(refs, unit, head, name, tile, refs[f"{name}_tiles"].at[slot], full, masked)
            if masked:
                self._clean(refs, unit, tile, slot)
            return carry

        self._visit(unit, load, None)
        self._drain(refs, unit, self.streams)

    def _load_and_widen(self, name: str, refs: dict[str, Any], unit: Unit, head: Any) -> None:
        """The same of the keys or the values of quantised pages: tiles come into places of their own, some ahead of those that
        are widened."""
        self._write_own(refs, unit, head, (name,))
        if name == self.streams[0]:
            self._load_queries(refs, unit, head)
        stages, stored, raw = self.tiles.stages, self.tiles.stored, refs[f"{name}_raw"]

        def request(number: Any) -> None:
            place, tile = lax.rem(number, jnp.int32(stored)), unit.tile(number, None)
            self._copy(refs, unit, head, name, tile, refs[f"{name}_stored"].at[place], raw.at[place], True)
            if f"{name}_scales" in refs:
                kv_head, size = lax.div(head, jnp.int32(self.head_tiles)), self.tiles.block_kv
                scales = refs[f"{name}_scales"].at[unit.sequence, kv_head, pl.ds(tile * size, size)]
                plgpu.copy_gmem_to_smem(scales, refs[f"{name}_scale_rows"].at[place], raw.at[place])

        pl.loop(0, jnp.minimum(unit.tiles, stored))(request)

        def widen(number: Any, carry: Any, masked: bool) -> Any:
            slot, place = lax.rem(number, jnp.int32(stages)), lax.rem(number, jnp.int32(stored))
            pl.when(number >= stages)(lambda: plgpu.barrier_wait(refs[f"{name}_free"].at[slot]))
            plgpu.barrier_wait(raw.at[place])
            self._widen(refs, unit, name, unit.tile(number, masked), place, slot, masked)
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs[f"{name}_full"].at[slot])
            pl.when(number + stored < unit.tiles)(lambda: request(number + stored))
            return carry

        self._visit(unit, widen, None)
        self._drain(refs, unit, (name,))

    def _widen(
        self, refs: dict[str, Any], unit: Unit, name: str, tile: Any, place: Any, slot: Any, masked: bool
    ) -> None:
        """Numbers of a place as those of another, with their tokens' scales; zeros for values that no row sees."""
        wide, first, step = refs[f"{name}_tiles"].at[slot], tile * self.tiles.block_kv, self.step(name)
        bits = self._there(refs, unit, tile) if masked else None
        for row in range(0, self.tiles.block_kv, ROWS):
            rows, seen, numbers = pl.ds(row, ROWS), None, refs[f"{name}_stored"].at[place]
            if f"{name}_scales" in refs:
                refs[f"{name}_factors"].at[slot, rows][...] = by_row(refs[f"{name}_scale_rows"].at[place, rows])
            if masked and name == self.streams[-1]:
                local = plgpu.broadcasted_iota(jnp.int32, (ROWS, step), 0, layout=_WIDENED) + row
                seen = self._seen(unit, local, first, bits)

            def part(column: Any, rows: Any = rows, seen: Any = seen, numbers: Any = numbers) -> None:
                columns = pl.ds(column, step)
                x = plgpu.load(numbers.at[rows, columns], layout=_WIDENED)  # type: ignore[call-arg] # of jax 0.10
                x = widened(x, wide.dtype)
                wide[rows, columns] = x if seen is None else jnp.where(seen, x, jnp.zeros((), x.dtype))

            dim = self.dims[name == "value"]
            if dim <= _AT_ONCE:
                for column in range(0, dim, step):
                    part(column)
            else:
                pl.loop(0, dim, step=step)(part)

    def _drain(self, refs: dict[str, Any], unit: Unit, names: tuple[str, ...]) -> None:
        """A block ends only when its places have been read."""
        stages = self.tiles.stages

        @pl.loop(jnp.maximum(unit.tiles - stages, 0), unit.tiles)
        def _wait(number: Any) -> None:
            for name in names:
                plgpu.barrier_wait(refs[f"{name}_free"].at[lax.rem(number, jnp.int32(stages))])

        if self.own:
            plgpu.wait_smem_to_gmem(0)

    def _write_own(self, refs: dict[str, Any], unit: Unit, head: Any, names: tuple[str, ...]) -> None:
        """Begin to write what a unit has of its own: copies of rows as pages store them."""
        if not self.own:
            return
        kv_head = lax.div(head, jnp.int32(self.head_tiles))

        @pl.when(unit.own >= 0)
        def _write() -> None:
            page = refs["table"][unit.sequence, lax.div(unit.own, jnp.int32(self.page))]
            row = lax.rem(unit.own, jnp.int32(self.page))
            for name in names:
                self._copy_own(refs, name, (unit.token, kv_head, 0), plgpu.copy_gmem_to_smem)
            for name in names:
                plgpu.barrier_wait(refs[f"{name}_own_full"])
                self._copy_own(refs, name, (page, kv_head, row), plgpu.copy_smem_to_gmem)

    def _copy_own(self, refs: dict[str, Any], name: str, at: tuple[Any, Any, Any], copy: Any) -> None:
        """Copy a token's key or value from the rows of the step, or to its page. at: the page, the head, the row."""
        half, held = int(name == "value"), refs[f"{name}_own"]
        first, columns = self.own[half][0], held.shape[1]
        loads = copy is plgpu.copy_gmem_to_smem
        array = refs[f"{name}_rows" if f"{name}_rows" in refs else "key_rows"]
        if not loads:
            array = refs[name if name in refs else "key"]
        page, kv_head, row = at
        for n in range(held.shape[0]):
            place = self.form.one_head(page, kv_head, half, row, pl.ds(first + n * columns, columns))
            if loads:
                copy(array.at[place], held.at[n], refs[f"{name}_own_full"])
            else:
                copy(held.at[n], array.at[place])

    def _copy(
        self, refs: dict[str, Any], unit: Unit, head: Any, name: str, tile: Any, place: Any, barrier: Any, masked: bool
    ) -> None:
        """Copy a tile's pages to a place. Dead pages aren't read; the barrier counts them."""
        kv_head, half = lax.div(head, jnp.int32(self.head_tiles)), int(name == "value")
        first, width = (self.first_value, self.dims[1]) if half else (0, self.dims[0])
        source = refs[name if name in refs else "key"]
        if self.own and masked:  # the tile with the unit's own key isn't a whole one
            first_key = tile * self.tiles.block_kv
            mine = (unit.own >= first_key) & (unit.own < first_key + self.tiles.block_kv)
            pl.when(mine)(lambda: plgpu.wait_smem_to_gmem(0))
        size = min(self.tiles.block_kv, self.page)
        for copy in range(self.copies):
            page, row, there = self._page(refs, unit, tile, copy)
            rows, columns = pl.ds(row, size), pl.ds(first, width)
            target = place.at[pl.ds(copy * size, size)]

            def read(page: Any = page, rows: Any = rows, columns: Any = columns, target: Any = target) -> None:
                at = self.form.one_head(page, kv_head, half, rows, columns)
                plgpu.copy_gmem_to_smem(source.at[at], target, barrier)

            if not masked:
                read()
                continue
            pl.when(there)(read)

            @pl.when(jnp.logical_not(there))
            def _skip() -> None:
                plgpu.barrier_arrive(barrier)

    def _clean(self, refs: dict[str, Any], unit: Unit, tile: Any, slot: Any) -> None:
        """Zeros for values that no row sees, once they have come."""
        name, size, step = self.streams[-1], self.tiles.block_kv, self.value_step
        values, first = refs[f"{name}_tiles"].at[slot], tile * size
        bits = self._there(refs, unit, tile)
        plgpu.barrier_wait(refs[f"{name}_raw"].at[slot])
        some = (first < unit.first_key) | (first + size > unit.end_key) | (bits != (1 << self.copies) - 1)

        @pl.when(some)
        def _zero() -> None:
            for row in range(0, size, ROWS):
                local = plgpu.broadcasted_iota(jnp.int32, (ROWS, step), 0, layout=TILE) + row
                seen = self._seen(unit, local, first, bits)
                for column in range(0, self.dims[1], step):
                    part = values.at[pl.ds(row, ROWS), pl.ds(column, step)]
                    held = plgpu.load(part, layout=TILE, optimized=False)  # type: ignore[call-arg] # of jax 0.10
                    part[...] = jnp.where(seen, held, jnp.zeros((), held.dtype))
            plgpu.commit_smem()

        plgpu.barrier_arrive(refs[f"{name}_clean"].at[slot])

    def _seen(self, unit: Unit, local: jax.Array, first: Any, bits: Any) -> jax.Array:
        """Whether keys of a tile, by their place there, are seen by any row and in a page that is there."""
        shift = (min(self.tiles.block_kv, self.page)).bit_length() - 1
        seen = (local >= unit.first_key - first) & (local < unit.end_key - first)
        return seen & (((bits >> (local >> shift)) & 1) != 0)

    # -- those that compute ------------------------------------------------------------------------------------------

    def _compute(self, refs: dict[str, Any], unit: Unit, number: Any, head: Any, warpgroup: Any) -> None:
        """Online softmax over the tiles."""
        tiles, parts = self.tiles, self.tiles.parts
        group, part = self._place(warpgroup)
        query, columns = refs["query_tile"].at[group], self.dims[1] // parts
        rows = pl.ds(group * ROWS, ROWS)
        low, high = (by_row(refs[name].at[unit.tile_of_rows, rows]) for name in ("low", "high"))
        scored = of_rows(refs, unit.tile_of_rows, head, rows)
        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), TILE),
            *self._start(refs, unit, head, group),
        )
        plgpu.barrier_wait(refs["query_full"].at[group])
        products, last = tensor_cores(self.interpret), self.streams[-1]
        kv_head = lax.div(head, jnp.int32(self.head_tiles))

        def visit(turn: Any, carry: Any, masked: bool) -> Any:
            sums, peak, total = carry
            tile = unit.tile(turn, masked)
            # With one place the compiler would keep the addresses of all its parts, unless it seems to differ from turn to turn.
            slot = lax.rem(turn, jnp.int32(tiles.stages)) if tiles.stages > 1 else jnp.minimum(tile, 0)
            keys = refs["key_tiles"].at[slot]
            cleaned = masked and not self.quantised
            plgpu.barrier_wait(refs["key_clean" if cleaned and self.latent else "key_full"].at[slot])
            (raw,) = products.logits((query, keys))
            of_keys = self._factors(refs, "key", slot, raw.shape)
            if not self.latent:
                plgpu.barrier_arrive(refs["key_free"].at[slot])
            seen = [] if not masked else self._visible(refs, unit, tile, rows, low, high)
            if of_keys is None and "key_scale" in refs:
                of_keys = refs["key_scale"][kv_head]
            place = (unit.sequence, tile * tiles.block_kv, self.page)
            x, factor, _ = weigh(PageTile(self.logits, refs, seen, raw.shape, of_keys, scored, *place), raw, masked)
            new_peak = jnp.maximum(peak, x.max(axis=1) * factor)
            # A row without visible keys so far keeps shift 0: its exponentials are 0, not NaN.
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak) if masked else new_peak
            shrink = jnp.exp2(peak - shift)
            weights = jnp.exp2(x * factor - along_rows(shift, x.shape))
            total = total * shrink + weights.sum(axis=1)
            sums = sums * along_rows(shrink, sums.shape)
            if not self.latent:
                plgpu.barrier_wait(refs["value_clean" if cleaned else "value_full"].at[slot])
            of_values = of_keys if self.latent else self._factors(refs, "value", slot, raw.shape)
            if f"{last}_scales" in refs and of_values is not None:  # one that no row sees may be NaN
                weights = weights * of_values
                weights = jnp.where(seen[0], weights, 0.0) if masked else weights
            values = refs[f"{last}_tiles"].at[slot]
            if self.dims[1] != values.shape[1] or parts > 1:
                values = values.at[:, pl.ds(part * columns, columns)]
            (sums,) = products.add_values((sums, weights.astype(query.dtype), values))
            plgpu.barrier_arrive(refs[f"{last}_free"].at[slot])
            return sums, new_peak, total

        self._finish(refs, number, head, warpgroup, self._visit(unit, visit, carry))

    def _factors(self, refs: dict[str, Any], name: str, slot: Any, shape: tuple[int, ...]) -> jax.Array | None:
        """The scales of a tile's keys or values along its columns, where each token has its own."""
        if f"{name}_factors" not in refs:
            return None
        of_keys = plgpu.load(refs[f"{name}_factors"].at[slot], layout=BY_COLUMN)  # type: ignore[call-arg] # of jax 0.10
        return lax.broadcast_in_dim(of_keys, shape, (1,))

    def _place(self, warpgroup: Any) -> tuple[Any, Any]:
        """(group of rows, part of the columns) of a warpgroup; numbers where there is one, so that addresses are known."""
        groups, parts = self.tiles.row_groups, self.tiles.parts
        group = 0 if groups == 1 else warpgroup if parts == 1 else lax.div(warpgroup, jnp.int32(parts))
        return group, 0 if parts == 1 else warpgroup if groups == 1 else lax.rem(warpgroup, jnp.int32(parts))

    def _start(self, refs: dict[str, Any], unit: Unit, head: Any, group: Any) -> tuple[jax.Array, jax.Array]:
        """(peak, total) of rows that have seen no key: a sink is a key without a value, seen once."""
        if "sinks" not in refs:
            return _filled(-jnp.inf), _filled(0.0)
        sinks = by_row(refs["sinks"].at[head, pl.ds(group * ROWS, ROWS)])
        sinks = sinks * LOG2E + jnp.where(unit.first != 0, 0.0, -jnp.inf)
        return sinks, jnp.where(sinks == -jnp.inf, 0.0, 1.0)

    def _visible(
        self, refs: dict[str, Any], unit: Unit, tile: Any, rows: Any, low: jax.Array, high: jax.Array
    ) -> list[jax.Array]:
        """The tests that a visible key passes, each [rows, keys]."""
        shape, first = (ROWS, self.tiles.block_kv), tile * self.tiles.block_kv
        local = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        seen = (local >= along_rows(low - first, shape)) & (local < along_rows(high - first, shape))
        if "words" in refs:
            seen |= self._drafts(refs["words"].at[unit.tile_of_rows], rows, local + (first - unit.first_draft))
        shift = min(self.tiles.block_kv, self.page).bit_length() - 1
        bits = self._there(refs, unit, tile)
        return [seen & (((bits >> (local >> shift)) & 1) != 0)]

    def _drafts(self, words: Any, rows: Any, number: jax.Array) -> jax.Array:
        """Whether rows' bits of drafts with these numbers are set; words: a reference [n, rows of the tile]."""
        of_rows = [along_rows(by_row(words.at[n, rows]), number.shape) for n in range(words.shape[0])]
        within = (number >= 0) & (number < BITS * len(of_rows))
        return within & seen_by_words(of_rows, number, jnp.int32(0), 1)

    def _finish(self, refs: dict[str, Any], number: Any, head: Any, warpgroup: Any, carry: Any) -> None:
        """Write the rows' output and lse."""
        sums, peak, total = carry
        group, part = self._place(warpgroup)
        columns = sums.shape[1]
        visible = total > 0
        safe = jnp.where(visible, total, 1.0)
        lse = jnp.where(visible, (peak + jnp.log(safe) * LOG2E) * LN2, -jnp.inf)
        if self.tiles.parts > 1:  # the others may still read the queries, whose place it takes
            plgpu.barrier_arrive(refs["query_free"])
            plgpu.barrier_wait(refs["query_free"])
        output = refs["output_tile" if "output_tile" in refs else "query_tile"].at[warpgroup]
        share = 1.0 / safe
        if "value_scale" in refs:
            share = share * refs["value_scale"][lax.div(head, jnp.int32(self.head_tiles))]
        output[...] = (sums * along_rows(share, sums.shape)).astype(refs["output"].dtype)
        rows, lse_rows = pl.ds(group * ROWS, self.rows), refs["lse_rows"].at[warpgroup]
        lse_rows[...] = lse
        plgpu.commit_smem()
        target = refs["output"].at[number, head, rows, pl.ds(part * columns, columns)]
        plgpu.copy_smem_to_gmem(output.at[pl.ds(0, self.rows)], target)

        @pl.when(part == 0)
        def _write_lse() -> None:
            plgpu.copy_smem_to_gmem(lse_rows.at[pl.ds(0, self.rows)], refs["lse"].at[number, head, rows])

        plgpu.wait_smem_to_gmem(0)


def widened(x: jax.Array, dtype: Any) -> jax.Array:
    """Numbers of 8 bits in a dtype of 16, which is exact. GPUs convert int8 to bfloat16 and fp8 to float16 with few instructions;
    others go through float32."""
    exact = x.astype(jnp.bfloat16 if x.dtype == jnp.int8 else jnp.float16)
    return exact if exact.dtype == dtype else exact.astype(jnp.float32).astype(dtype)


def _filled(x: Any) -> jax.Array:
    """A number for each row."""
    rows: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)
    return rows
