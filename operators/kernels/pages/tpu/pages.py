"""Fetching pages from HBM: blocks of them go into a ring of buffers, ahead of the one being computed."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...precision import tile_product
from .geometry import LANES, Geometry, Options, row_places, rows_per_word
from .selected import Chosen, piece_of
from .softmax import divided
from .words import numbers, words_of
from .work_items import FIELDS, FIRST_PAGE, OwnPages, WorkItem
from .writes import Writer

__all__ = ["Pages", "page_scratch", "walk", "whole_word"]


def page_scratch(geometry: Geometry, options: Options) -> dict[str, Any]:
    """A ring of buffers, each for a block of pages of every stream, and the kernel's place in it."""
    scratch: dict[str, Any] = {
        f"{name}_buffer": pltpu.VMEM((options.buffers, options.pages_per_block, *geometry.kept(name)), dtype)
        for name, (_, dtype) in geometry.streams().items()
    }
    return scratch | {
        "arrived": pltpu.SemaphoreType.DMA((options.buffers, len(geometry.streams()))),
        "here": pltpu.SMEM((1,), jnp.int32),  # the slot visited next
        "front": pltpu.SMEM((3,), jnp.int32),  # the block to fetch next: work item, first page, slot
    }


class Pages:
    """Fetches blocks of pages and reads them. A page with an id out of range, or beyond the block's end, isn't
    fetched; its values are 0."""

    def __init__(
        self, geometry: Geometry, options: Options, refs: dict[str, Any], writer: Writer | None = None
    ) -> None:
        """`writer`: writes each work item's own row when its page has arrived."""
        self.geometry, self.options, self.refs, self.writer = geometry, options, refs, writer
        self.chosen = Chosen(geometry, refs) if geometry.selected else None
        shard = refs["count"][1] if options.stride > 1 else None
        self.own, self.shard = OwnPages(geometry, options, shard), 0 if shard is None else shard
        self.block = options.pages_per_block
        self.names = tuple(geometry.streams())
        self.last = self.names[0 if geometry.one_array else 1]  # the stream that values come from

    def begin(self, words: Any, count: Any) -> None:
        """Before the first work item: fill all slots of the ring but one."""
        front = self.refs["front"]
        front[0], front[1], front[2] = np.int32(0), words[FIRST_PAGE], np.int32(0)
        lax.fori_loop(0, self.options.buffers - 1, lambda i, _: self.ahead(words, count), None)

    def ahead(self, words: Any, count: Any) -> None:
        """Start fetching the next block that isn't being fetched yet, whichever work item it belongs to."""
        front, block = self.refs["front"], np.int32(self.block)
        known = count if self.chosen is None else jnp.minimum(count, self.chosen.known)

        @pl.when(front[0] < known)
        def _more() -> None:
            item, first, slot = WorkItem.read(words, front[0]), front[1], front[2]
            self._start(slot, front[0], item, first)
            done = first + block >= item.end
            after = jnp.minimum(front[0] + 1, count - 1)
            front[0] = front[0] + done.astype(jnp.int32)
            front[1] = jnp.where(done, words[after * FIELDS + FIRST_PAGE], first + block)
            front[2] = jnp.where(slot + 1 == self.options.buffers, 0, slot + 1)

    def _start(self, slot: Any, number: Any, item: WorkItem, first: Any) -> None:
        """The block from page `first` on of an item, and its number."""
        whole = self._whole(item, first)

        def fetch(i: Any, page: Any) -> None:
            for stream in range(len(self.names)):
                self._copy(slot, i, stream, page).start()

        @pl.when(whole)
        def _all() -> None:
            place = item.seq * self.geometry.width + first
            for i in range(self.block):
                fetch(i, self.refs["table"][place + i] if self.chosen is None else self.chosen.id(number, first + i))

        @pl.when(jnp.logical_not(whole))
        def _some() -> None:
            def fetch_page(i: Any, _: None) -> None:
                valid, page = self._page(item, first + i, number)
                pl.when(valid)(lambda: fetch(i, page))

            lax.fori_loop(np.int32(0), np.int32(self.block), fetch_page, None)

    def wait(self, slot: Any, item: WorkItem, first: Any) -> Any:
        """Wait until a block has arrived; returns a word with a bit for each page that was fetched.

        Values of other pages, and those past the sequence's end, are set to 0: a freed page may have held NaN, and 0 times NaN is
        NaN.
        """
        whole = self._whole(item, first)

        @pl.when(whole)
        def _all() -> None:  # the copies of a semaphore are counted together
            for stream, name in enumerate(self.names):
                buffer = self.refs[f"{name}_buffer"].at[slot]
                pltpu.make_async_copy(buffer, buffer, self.refs["arrived"].at[slot, stream]).wait()

        def wait_page(i: Any, word: Any) -> Any:
            valid, page = self._page(item, first + i)

            @pl.when(valid)
            def _arrive() -> None:
                for stream in range(len(self.names)):
                    self._copy(slot, i, stream, page).wait()

            @pl.when(jnp.logical_not(valid))
            def _clear() -> None:
                self._clear(slot, i)

            return word if self.chosen is not None else word | lax.shift_left(valid.astype(jnp.int32), i)

        # A whole block needs no check of single pages.
        some = jnp.where(whole, np.int32(0), np.int32(self.block))
        word = lax.fori_loop(np.int32(0), some, wait_page, np.int32(0))
        if self.writer is not None:  # before values past the end are cleared: a tile is written as it was fetched
            self._write(self.writer, slot, item, first)
        last, tail = self.own.place(item.keys)
        last = last - first

        @pl.when((tail != 0) & (last >= 0) & (last < self.block))
        def _clear() -> None:
            self._clear(slot, last, tail)

        return word if self.chosen is not None else jnp.where(whole, whole_word(self.block), word)

    def _clear(self, slot: Any, place: Any, tail: Any = None) -> None:
        """Set a page's values to 0, those of its token `tail` and later ones if given; if both alternate, its keys too."""
        buffer, geometry = self.refs[f"{self.last}_buffer"], self.geometry
        if geometry.alternating:  # packed rows are stored word by word: for a whole page that would be a long program

            def clear(i: Any, _: None) -> None:
                buffer[slot, place, i] = jnp.zeros(buffer.shape[3:], buffer.dtype)

            lax.fori_loop(np.int32(0) if tail is None else tail, np.int32(geometry.page), clear, None)
            return
        if tail is None:
            buffer[slot, place] = jnp.zeros(buffer.shape[2:], buffer.dtype)
            return
        page = buffer[slot, place]
        wide = page if page.dtype == jnp.float32 else page.astype(jnp.float32)
        axis = 0 if geometry.tokens_first else 1
        inside = row_places(wide.shape, axis, in_tiles=geometry.in_tiles(self.last)) < tail
        buffer[slot, place] = jnp.where(inside, wide, 0.0).astype(buffer.dtype)

    def _write(self, writer: Writer, slot: Any, item: WorkItem, first: Any) -> None:
        at = lax.div(item.position, np.int32(self.geometry.page))
        valid, page = self._page(item, at)

        @pl.when(valid & (at >= first) & (at < first + np.int32(self.block)))
        def _own() -> None:
            writer.row(slot, at - first, item, page)

    def _whole(self, item: WorkItem, first: Any) -> Any:
        """Whether every page of the block is fetched."""
        return (item.sound != 0) & (first + np.int32(self.block) <= item.end)

    def _page(self, item: WorkItem, at: Any, number: Any = None) -> tuple[Any, Any]:
        """(whether it is fetched, its id). number: the item's, where its pages are named; without, any id of one will do."""
        width = self.geometry.width
        if self.chosen is not None:
            return at < item.end, np.int32(0) if number is None else self.chosen.id(number, jnp.minimum(at, width - 1))
        page = self.refs["table"][item.seq * width + jnp.minimum(at, width - 1)]
        return (at < item.end) & (page >= 0) & (page < self.geometry.pages), page

    def key(self, slot: Any, head: Any) -> jax.Array:
        """Keys of a kv head, [keys of the block, dim]."""
        return self._rows("key", slot, self.geometry.row_of(head, False), self.geometry.key_lanes)

    def value(self, slot: Any, head: Any) -> jax.Array:
        """Values of a kv head."""
        return self._rows(self.last, slot, self.geometry.row_of(head, True), self.geometry.value_lanes)

    def rope(self, slot: Any, head: Any) -> jax.Array:
        """Rotary keys of a kv head, which are apart from the latents."""
        return self._rows("rope", slot, head, (0, self.geometry.rope_row))

    def products(self, query: jax.Array, key: jax.Array, slot: Any, head: Any, scale: jax.Array | None) -> jax.Array:
        """Products of rows with a head's keys, times the scale of each key, if given; rotary keys apart have none."""
        geometry = self.geometry
        if geometry.rope_dtype is None:
            raw = tile_product(query, key, 1, 1)
            return raw if scale is None else raw * scale
        latent, rope = query[:, : geometry.key_lanes[1]], query[:, geometry.key_lanes[1] :]
        raw = tile_product(latent, key, 1, 1)
        return (raw if scale is None else raw * scale) + tile_product(rope, self.rope(slot, head), 1, 1)

    def of_chosen(self, product: Any, slot: Any, first: Any) -> jax.Array:
        """product(): weights times a block's values. In a piece are keys that nobody chose, whose weights are 0: if one's value
        isn't finite, all of theirs are set to 0, and the product is made again."""
        found, chosen = product(), self.chosen
        if chosen is None or self.geometry.page == 1:
            return found
        finite = jnp.where(jnp.abs(found) < jnp.inf, 0.0, 1.0).sum() == 0
        buffer = self.refs[f"{self.last}_buffer"].at[slot]
        pl.when(jnp.logical_not(finite))(lambda: chosen.clear_others(self.last, buffer, first))
        return lax.cond(finite, lambda: found, product)

    def token_scales(self, slot: Any, valid: jax.Array, first: Any) -> dict[str, jax.Array]:
        """Scales of the block from page `first` on that are by token, by name: [kv_heads, keys] each, 0 where not valid
        [1, keys]. Latents' keys and values share theirs."""
        scales = {name: self._scale_rows(name, slot, valid, first) for name in self.names if name.endswith("_scale")}
        if scales and self.geometry.layout == "latent":
            scales["value_scale"] = scales["key_scale"]
        return scales

    def _scale_rows(self, name: str, slot: Any, valid: jax.Array, first: Any) -> jax.Array:
        """Scales of the block's keys, [kv_heads, keys]; 0 where not valid [1, keys].

        A product with ones and zeros spreads the pages' slots over the lanes; it is exact, because each sum has one term.
        """
        geometry, size = self.geometry, self.block
        page, kv_heads = geometry.page, geometry.kv_heads
        scales = self.refs[f"{name}_buffer"][slot]
        scales = jnp.where(jnp.abs(scales) < jnp.inf, scales, 0.0)  # an unused slot must not reach another's sum
        dot = functools.partial(lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        if geometry.tokens_first:
            scales = scales.reshape(size * page, kv_heads)
            here, there = (lax.broadcasted_iota(jnp.int32, (kv_heads, kv_heads), axis) for axis in (0, 1))
            transposed = dot(jnp.where(here == there, 1.0, 0.0), scales, (((1,), (1,)), ((), ())))
            return jnp.where(valid, transposed, 0.0)
        stored = scales.shape[-1]
        scales = scales.reshape(size * kv_heads, stored)
        lane = lax.broadcasted_iota(jnp.int32, (1, size * page), 1)
        there = divided(lane, page)
        inside = lane - there * page  # where in its stored page a key's scale is
        if geometry.pieces > 1:
            assert self.chosen is not None
            for i in range(size):
                inside = jnp.where(there == i, inside + self.chosen.offset(first + i), inside)
        spot = lax.broadcasted_iota(jnp.int32, (stored, size * page), 0)
        spread = jnp.where(spot == jnp.broadcast_to(inside, spot.shape), 1.0, 0.0)
        wide = dot(scales, spread, (((1,), (0,)), ((), ())))
        lanes = lax.broadcasted_iota(jnp.int32, (kv_heads, size * page), 1)
        rows = jnp.zeros((kv_heads, size * page), jnp.float32)
        for i in range(size):
            of_page = (lanes >= i * page) & (lanes < (i + 1) * page)
            rows = jnp.where(of_page, wide[i * kv_heads : (i + 1) * kv_heads], rows)
        return jnp.where(valid, rows, 0.0)

    def flat(self, of_values: bool, slot: Any) -> jax.Array:
        """All kv heads' keys (or values) where a page's tokens come first: [keys * kv_heads, dim], ordered by `flat_order`."""
        geometry = self.geometry
        if geometry.alternating:
            dtype, width = geometry.key_dtype, geometry.key_row
            pack = rows_per_word(dtype)
            words = self._words("key", slot, (self.block * geometry.page * 2 * geometry.kv_heads // pack, width))[...]
            rows = [numbers(words, dtype, place) for place in range(of_values, pack, 2)]
            return as_factor(rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0), geometry.compute_dtype)
        values = self.refs[f"{self.last if of_values else 'key'}_buffer"][slot]
        return as_factor(values.reshape(-1, values.shape[-1]), geometry.compute_dtype)

    def flat_order(self) -> jax.Array:
        """int32 [1, keys * kv_heads]: which of them, key by key with all heads of each, a row of `flat` is."""
        count = self.block * self.geometry.page * self.geometry.kv_heads
        row = lax.broadcasted_iota(jnp.int32, (1, count), 1)
        if not self.geometry.alternating or rows_per_word(self.geometry.key_dtype) < 4:
            return row
        # First those in the low halves of words, each with two heads, then those in the high ones.
        low = row < np.int32(count // 2)
        return jnp.where(low, 2 * row, 2 * row - np.int32(count - 1))

    def _rows(self, name: str, slot: Any, row: Any, lanes: tuple[int, int]) -> jax.Array:
        """A row of every token, or a head's rows of every page: [keys of the block, numbers]."""
        geometry = self.geometry
        if geometry.read_in_words(name):
            return as_factor(self._of_words(name, slot, row), geometry.compute_dtype)
        buffer, lane = self.refs[f"{name}_buffer"], slice(*lanes)
        if geometry.in_tiles(name):
            values = buffer[slot, :, row, :, :, lane]
        else:
            values = buffer[slot, :, :, row, lane] if geometry.tokens_first else buffer[slot, :, row, :, lane]
        rows = values.reshape(self.block * geometry.page, lanes[1] - lanes[0])
        return as_factor(rows, geometry.compute_dtype)

    def _of_words(self, name: str, slot: Any, row: int) -> jax.Array:
        """A row of every token from the words that hold it."""
        shape, dtype = self.geometry.streams()[name]
        pack, parts = rows_per_word(dtype), shape[-1] // LANES
        stride = math.prod(shape[1:-1]) // pack * parts
        words = self._words(name, slot, (self.block * self.geometry.page * stride, LANES))
        first = row // pack * parts
        found = [numbers(words[first + i :: stride], dtype, row % pack) for i in range(parts)]
        return found[0] if parts == 1 else jnp.concatenate(found, axis=1)

    def _words(self, name: str, slot: Any, shape: tuple[int, int]) -> Any:
        return words_of(self.refs[f"{name}_buffer"].at[slot], shape, self.options.interpret)

    def _copy(self, slot: Any, i: Any, stream: int, page: Any) -> Any:
        name = self.names[stream]
        return pltpu.make_async_copy(
            self._source(name, page),
            self.refs[f"{name}_buffer"].at[slot, i],
            self.refs["arrived"].at[slot, stream],
        )

    def _source(self, name: str, page: Any) -> Any:
        """A page in HBM, or the piece of one with this number among all pieces."""
        geometry, pages = self.geometry, self.refs[f"{name}_pages"]
        if geometry.pieces == 1:
            return pages.at[page]
        stored, piece = piece_of(geometry, page)
        if geometry.in_tiles(name):
            return pages.at[stored, :, pl.ds(piece, 1)]
        if name.endswith("_scale") and not geometry.tokens_first:
            return pages.at[stored]
        rows = pl.ds(pl.multiple_of(piece * np.int32(geometry.page), geometry.page), geometry.page)
        return pages.at[stored, rows] if geometry.tokens_first else pages.at[stored, :, rows]


def as_factor(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert int8 and fp8 through float32, exactly: not every generation converts them directly."""
    if x.dtype == dtype:
        return x
    return x.astype(jnp.float32).astype(dtype)


def whole_word(pages: int) -> np.int32:
    """A bit for each page of a block."""
    return np.int32((1 << pages) - 1) if pages < 32 else np.int32(-1)


def walk(pages: Pages, words: Any, number: Any, count: Any, visit: Any, carry: Any) -> Any:
    """Call visit(slot, first page, word of fetched pages, carry) for each block of pages of a work item.

    While a block is visited the next ones are being fetched, of this work item or of those that follow.
    """
    item, here = WorkItem.read(words, number), pages.refs["here"]
    size, ring = np.int32(pages.block), pages.options.buffers

    @pl.when(number == 0)
    def _first() -> None:
        here[0] = np.int32(0)
        pages.begin(words, count)

    trips = lax.div(item.end - item.first + (size - 1), size)
    begun = here[0]

    def step(block: Any, carry: Any) -> Any:
        slot, first = lax.rem(begun + block, np.int32(ring)), item.first + block * size
        pages.ahead(words, count)  # into the slot visited last
        return visit(slot, first, pages.wait(slot, item, first), carry)

    carry = lax.fori_loop(np.int32(0), trips, step, carry)
    here[0] = lax.rem(begun + trips, np.int32(ring))
    return carry
