"""A block of threads over pages: who loads pages of keys and values by TMA, and what its rows see. How they are multiplied is
each generation's: hopper_pages, blackwell_pages.

Its rows are tokens of one sequence with the query heads of a kv head, one after the other. The page table says where the next
tile's keys are; each page is a copy of its own. First come the tiles of which every row sees every key, then the others: there
zeros are written over values that nobody may see, because a weight of 0 times what a freed page holds may be NaN. All roles go
through the same tiles in the same order. A place in shared memory has a barrier for each thing that happens to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....page_layouts import PageLayout
from ....mosaic.kernel.block import BLOCKS, BlockOfThreads, along_rows, in_ring
from ....mosaic.kernel.mosaic_sizes import swizzled_columns
from ....mosaic.kernel.tile import MosaicLogits
from ...block_words import seen_by_words
from ...lse import LOG2E
from ..paged_mask import BITS
from .page_tile import PageTile, score_rows
from .page_tiles import PageSizing, PageTiles, row_copies
from .page_units import FIELDS

__all__ = ["PagesBlock", "Unit", "Work"]

_HELD = plgpu.Layout.WGMMA  # how a warpgroup holds values while it writes zeros over some of them
_ROWS = 64  # of them at once


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


class Work(NamedTuple):
    """What a block works on: a unit, its number, a part of the heads, and of the columns of values."""

    unit: Unit
    number: Any
    head: Any
    part: Any = 0


@dataclass(frozen=True)
class PagesBlock(BlockOfThreads):
    """Blocks are numbered (unit, part of the heads, part of the values' columns), the last fastest. A unit with a key of its own
    writes it to its page before it loads that page; no other block has the page's row. page: tokens. heads: of that grid;
    head_tiles: parts of the query heads of a kv head. in_key: values are the first columns of their keys. stored: the dtype of
    quantised pages; scaled: 'key', 'value', where each token has a scale."""

    sizes: PageTiles
    logits: MosaicLogits
    form: PageLayout
    page: int
    pages: int
    heads: int
    head_tiles: int
    dims: tuple[int, int]  # padded
    first_value: int  # the column of a row at which its value begins
    rows: int  # of a group that are loaded and written; what others hold is never seen
    in_key: bool
    interpret: bool
    stored: Any = None
    scaled: tuple[str, ...] = ()
    own: tuple[tuple[int, int], ...] = ()  # of a token's key and value in a page: the first column, how many
    in_registers: ClassVar[Any]  # how a tile's numbers lie in the registers of a warpgroup
    sizing: ClassVar[PageSizing]

    def work(self, refs: dict[str, Any]) -> Work:
        """This block's."""
        block, part = lax.div(lax.axis_index(BLOCKS), jnp.int32(self.sizes.column_blocks)), self.columns_block()
        head, number = lax.rem(block, self.heads), lax.div(block, self.heads)
        return Work(Unit(*(refs["units"][number, field] for field in range(len(FIELDS)))), number, head, part)

    def columns_block(self) -> Any:
        """Which part of the columns of values this block has."""
        blocks = self.sizes.column_blocks
        return 0 if blocks == 1 else lax.rem(lax.axis_index(BLOCKS), jnp.int32(blocks))

    def used(self, work: Work, role: Callable[[], None]) -> None:
        """Play a role, if the block has work."""
        pl.when(work.unit.sequence >= 0)(role)

    def visit(self, unit: Unit, visit: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
        """visit(number, carry, masked) for all tiles."""
        for begin, end, masked in ((0, unit.whole, False), (unit.whole, unit.tiles, True)):

            def turn(number: Any, carry: Any, masked: bool = masked) -> Any:
                return visit(number, carry, masked)

            carry = lax.fori_loop(jnp.int32(begin), end, turn, carry)
        return carry

    def kv_head(self, work: Work) -> Any:
        """Of the block's heads."""
        return lax.div(work.head, jnp.int32(self.head_tiles))

    @property
    def value_step(self) -> int:
        """Columns of a value that are swizzled together, of those of a key too where they are the first of them."""
        of_part = self.dims[1] // (self.sizes.parts * self.sizes.column_blocks)
        return swizzled_columns(of_part, *(self.dims if self.in_key else ()))

    def step(self, stream: str) -> int:
        """Columns of a tile of this that are swizzled together."""
        return self.value_step if stream == self.streams[-1] else swizzled_columns(self.dims[0])

    @property
    def copies(self) -> int:
        """Of a tile: its pages, or a part of one."""
        return max(1, self.sizes.block_kv // self.page)

    # -- pages -------------------------------------------------------------------------------------------------------

    def _page(self, refs: dict[str, Any], unit: Unit, tile: Any, copy: int) -> tuple[Any, Any, Any]:
        """(a page of a tile, the row there at which the tile's keys begin, whether any of its keys is seen)."""
        table, size = refs["table"], self.sizes.block_kv
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

    def there(self, refs: dict[str, Any], unit: Unit, tile: Any) -> Any:
        """A bit for each page of a tile: whether its keys are seen."""
        bits = (
            jnp.where(self._page(refs, unit, tile, copy)[2], jnp.int32(1 << copy), jnp.int32(0))
            for copy in range(self.copies)
        )
        return reduce(jnp.bitwise_or, bits)

    # -- who loads ---------------------------------------------------------------------------------------------------

    def load_queries(self, refs: dict[str, Any], work: Work) -> None:
        """Those of the block's rows."""
        for group in range(self.sizes.row_groups):
            rows = refs["query"].at[work.unit.tile_of_rows, work.head, pl.ds(group * self.sizes.lines, self.rows)]
            if held := self.sizes.held:
                rows = rows.at[:, pl.ds(held, self.dims[0] - held)]
            target = refs["query_tile"].at[group, pl.ds(0, self.rows)]
            plgpu.copy_gmem_to_smem(rows, target, refs["query_full"].at[group])

    def load(self, refs: dict[str, Any], work: Work) -> None:
        """The rows' queries, and every tile into the next place, once that is free."""
        self.write_own(refs, work, self.streams)
        self.load_queries(refs, work)
        stages, unit = self.sizes.stages, work.unit

        def load(number: Any, carry: Any, masked: bool) -> Any:
            slot, tile = in_ring(number, stages), unit.tile(number, masked)
            for name in self.streams:

                @pl.when(number >= stages)
                def _wait(name: str = name) -> None:
                    plgpu.barrier_wait(refs[f"{name}_free"].at[slot])

                full = refs[self.loaded(name, masked)].at[slot]
                self.copy(refs, work, name, tile, refs[f"{name}_tiles"].at[slot], full, masked)
            if masked:
                self.after_load(refs, unit, tile, slot)
            return carry

        self.visit(unit, load, None)
        self.drain(refs, unit.tiles, self.streams)

    def loaded(self, name: str, masked: bool) -> str:
        """The barrier that counts the copies of a tile."""
        del masked
        return f"{name}_full"

    def after_load(self, refs: dict[str, Any], unit: Unit, tile: Any, slot: Any) -> None:
        """What who loads does with a tile that some row doesn't see whole. Default: nothing."""

    def copy(
        self, refs: dict[str, Any], work: Work, name: str, tile: Any, place: Any, barrier: Any, masked: bool
    ) -> None:
        """Copy a tile's pages to a place. Dead pages aren't read; the barrier counts them."""
        half = int(name == "value")
        first, width = (self.first_value, self.dims[1]) if half else (0, self.dims[0])
        source = refs[name if name in refs else "key"]
        if self.own and masked:  # the tile with the unit's own key isn't a whole one
            own, first_key = work.unit.own, tile * self.sizes.block_kv
            mine = (own >= first_key) & (own < first_key + self.sizes.block_kv)
            pl.when(mine)(lambda: plgpu.wait_smem_to_gmem(0))
        size = min(self.sizes.block_kv, self.page)
        for copy in range(self.copies):
            page, row, there = self._page(refs, work.unit, tile, copy)
            rows, columns = pl.ds(row, size), pl.ds(first, width)
            target = place.at[pl.ds(copy * size, size)]

            def read(page: Any = page, rows: Any = rows, columns: Any = columns, target: Any = target) -> None:
                at = self.form.one_head(page, self.kv_head(work), half, rows, columns)
                plgpu.copy_gmem_to_smem(source.at[at], target, barrier)

            if not masked:
                read()
                continue
            pl.when(there)(read)

            @pl.when(there ^ True)  # a warp has no negation of booleans
            def _skip() -> None:
                plgpu.barrier_arrive(barrier)

    def drain(self, refs: dict[str, Any], count: Any, names: tuple[str, ...]) -> None:
        """See BlockOfThreads."""
        super().drain(refs, count, names)
        if self.own:
            plgpu.wait_smem_to_gmem(0)

    def write_own(self, refs: dict[str, Any], work: Work, names: tuple[str, ...]) -> None:
        """Begin to write what a unit has of its own: copies of rows as pages store them."""
        if not self.own:
            return
        unit, kv_head = work.unit, self.kv_head(work)

        @pl.when(unit.own >= 0)
        def _write() -> None:
            page = refs["table"][unit.sequence, lax.div(unit.own, jnp.int32(self.page))]
            row = lax.rem(unit.own, jnp.int32(self.page))
            for name in names:
                self.copy_own(refs, name, (unit.token, kv_head, 0), plgpu.copy_gmem_to_smem)
            for name in names:
                plgpu.barrier_wait(refs[f"{name}_own_full"])
                self.copy_own(refs, name, (page, kv_head, row), plgpu.copy_smem_to_gmem)

    def copy_own(self, refs: dict[str, Any], name: str, at: tuple[Any, Any, Any], copy: Any) -> None:
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

    def own_places(self, dtype: Any) -> dict[str, Any]:
        """Places for what a unit has of its own, with their barriers."""
        made, stored = dict[str, Any](), jnp.dtype(dtype if self.stored is None else self.stored)
        for stream, (_, numbers) in zip(self.streams, self.own, strict=False):
            copies = row_copies(numbers, stored.itemsize)
            assert copies is not None  # otherwise rows are refused
            made[f"{stream}_own"] = plgpu.SMEM((copies, numbers // copies), stored)
            made[f"{stream}_own_full"] = plgpu.Barrier(num_arrivals=copies)
        return made

    def zero_hidden(self, refs: dict[str, Any], unit: Unit, tile: Any, slot: Any) -> None:
        """Zeros for values that no row sees."""
        size, step, columns = self.sizes.block_kv, self.value_step, self.dims[1] // self.sizes.column_blocks
        values, first = refs[f"{self.streams[-1]}_tiles"].at[slot], tile * size
        bits = self.there(refs, unit, tile)
        some = (first < unit.first_key) | (first + size > unit.end_key) | (bits != (1 << self.copies) - 1)

        @pl.when(some)
        def _zero() -> None:
            for row in range(0, size, _ROWS):
                local = plgpu.broadcasted_iota(jnp.int32, (_ROWS, step), 0, layout=_HELD) + row
                seen = self.seen(unit, local, first, bits)
                for column in range(0, columns, step):
                    part = values.at[pl.ds(row, _ROWS), pl.ds(self.columns_block() * columns + column, step)]
                    held = plgpu.load(part, layout=_HELD, optimized=False)  # type: ignore[call-arg] # of jax 0.10
                    part[...] = jnp.where(seen, held, jnp.zeros((), held.dtype))
            plgpu.commit_smem()

    def seen(self, unit: Unit, local: jax.Array, first: Any, bits: Any) -> jax.Array:
        """Whether keys of a tile, by their place there, are seen by any row and in a page that is there."""
        seen = (local >= unit.first_key - first) & (local < unit.end_key - first)
        return seen & self._bit(bits, local)

    def _bit(self, bits: Any, local: jax.Array) -> jax.Array:
        """Of the page of keys, by their place in the tile."""
        shift = min(self.sizes.block_kv, self.page).bit_length() - 1
        return ((bits >> (local >> shift)) & 1) != 0

    # -- who computes ------------------------------------------------------------------------------------------------

    def score_rows(self, refs: dict[str, Any], work: Work, rows: Any) -> dict[str, jax.Array]:
        """What a score reads of rows: it stays in registers while a block goes through its keys."""
        found = score_rows(refs, work.unit.tile_of_rows, work.head, rows)
        return {name: self.by_row(ref) for name, ref in found.items()}

    def part(
        self,
        refs: dict[str, Any],
        work: Work,
        tile: Any,
        seen: list[jax.Array],
        keys: tuple[int, int],
        numbers: dict[str, jax.Array],
        scale: Any = None,
        value_scale: Callable[[], jax.Array | None] = lambda: None,
    ) -> PageTile:
        """What `weigh` takes. keys: of the tile, from the first of these so many; numbers: those of `score_rows`. scale,
        value_scale: of keys and of values."""
        shape, first = (self.sizes.lines, keys[1]), tile * self.sizes.block_kv + keys[0]
        place = work.unit.sequence, first, self.page, self.in_registers
        return PageTile(self.logits, refs, seen, shape, scale, numbers, *place, value_scale)

    def limits(self, refs: dict[str, Any], unit: Unit, rows: Any) -> tuple[jax.Array, jax.Array]:
        """(low, high) of the keys that rows of a tile see."""
        low, high = (self.by_row(refs[name].at[unit.tile_of_rows, rows]) for name in ("low", "high"))
        return low, high

    def visible(
        self,
        refs: dict[str, Any],
        unit: Unit,
        tile: Any,
        rows: Any,
        limits: tuple[jax.Array, jax.Array],
        keys: tuple[int, int],
    ) -> list[jax.Array]:
        """The tests that a visible key passes, each [rows, keys]. keys: of the tile, from the first of these so many."""
        shape, first = (self.sizes.lines, keys[1]), tile * self.sizes.block_kv
        local = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.in_registers) + keys[0]
        low, high = (along_rows(x - first, shape) for x in limits)
        seen = (local >= low) & (local < high)
        if "words" in refs:
            seen |= self._drafts(refs["words"].at[unit.tile_of_rows], rows, local + (first - unit.first_draft))
        return [seen & self._bit(self.there(refs, unit, tile), local)]

    def _drafts(self, words: Any, rows: Any, number: jax.Array) -> jax.Array:
        """Whether rows' bits of drafts with these numbers are set; words: a reference [n, rows of the tile]."""
        of_rows = [along_rows(self.by_row(words.at[n, rows]), number.shape) for n in range(words.shape[0])]
        within = (number >= 0) & (number < BITS * len(of_rows))
        return within & seen_by_words(of_rows, number, jnp.int32(0), 1)

    def start(self, refs: dict[str, Any], work: Work, group: Any) -> tuple[jax.Array, jax.Array]:
        """(peak, total) of rows that have seen no key: a sink is a key without a value, seen once."""
        if "sinks" not in refs:
            return self._filled(-jnp.inf), self._filled(0.0)
        lines = self.sizes.lines
        sinks = self.by_row(refs["sinks"].at[work.head, pl.ds(group * lines, lines)])
        sinks = sinks * LOG2E + jnp.where(work.unit.first != 0, 0.0, -jnp.inf)
        return sinks, jnp.where(sinks == -jnp.inf, 0.0, 1.0)

    def finite_peak(self, peak: jax.Array) -> jax.Array:
        """What is subtracted from logits, some of them hidden: 0 in a row without visible keys so far, whose exponentials are
        then 0 and not NaN. With a start at a finite number, as over dense arrays, the places of tables lack registers."""
        shift: jax.Array = jnp.where(peak == -jnp.inf, 0.0, peak)
        return shift

    def by_row(self, ref: Any) -> jax.Array:
        """A number for each of a warpgroup's rows."""
        rows: jax.Array = plgpu.load(ref, layout=self.in_registers.reduce(1), optimized=False)  # type: ignore[call-arg] # of jax 0.10
        return rows

    def _filled(self, x: Any) -> jax.Array:
        """The same number for each of them."""
        full = jnp.full((self.sizes.lines,), x, jnp.float32)
        rows: jax.Array = plgpu.layout_cast(full, self.in_registers.reduce(1))
        return rows
