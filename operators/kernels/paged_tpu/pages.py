"""Pages on their way from HBM: blocks of them are fetched into one half of a buffer while the other half is computed on."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .geometry import Geometry, Options
from .units import Unit

__all__ = ["Pages", "page_scratch", "walk"]


def page_scratch(geometry: Geometry, options: Options) -> dict[str, Any]:
    """Buffers, semaphores, and the number of the buffer's half that comes next."""
    found: dict[str, Any] = {
        f"{name}_buffer": pltpu.VMEM((2, options.pages_per_block, *shape), dtype)
        for name, (shape, dtype) in geometry.streams().items()
    }
    return found | {
        "arrived": pltpu.SemaphoreType.DMA((2, len(geometry.streams()))),
        "half": pltpu.SMEM((1,), jnp.int32),
    }


class Pages:
    """Fetches blocks of pages and reads what came. A page with an id that is out of range, or beyond the block's end, isn't
    fetched; its values are 0."""

    def __init__(self, geometry: Geometry, options: Options, refs: dict[str, Any]) -> None:
        self.geometry, self.options, self.refs = geometry, options, refs
        self.block = options.pages_per_block
        self.names = tuple(geometry.streams())
        self.last = self.names[0 if geometry.joined else 1]  # the stream that values come from

    def start(self, half: Any, seq: Any, first: Any, end: Any) -> None:
        """Begin to fetch the block of pages from `first` on into a half of the buffers."""

        def slot(slot: Any, carry: None) -> None:
            live, page = self._page(seq, first + slot, end)

            @pl.when(live)
            def _fetch() -> None:
                for stream in range(len(self.names)):
                    self._copy(half, slot, stream, page).start()

            @pl.when(jnp.logical_not(live))
            def _clear() -> None:
                buffer = self.refs[f"{self.last}_buffer"]
                buffer[half, slot] = jnp.zeros(buffer.shape[2:], buffer.dtype)

        self._each_slot(slot, None)

    def wait(self, half: Any, seq: Any, first: Any, end: Any) -> Any:
        """Wait until that block has come; a word with a bit for each of its pages that was fetched."""

        def slot(slot: Any, word: Any) -> Any:
            live, page = self._page(seq, first + slot, end)

            @pl.when(live)
            def _arrive() -> None:
                for stream in range(len(self.names)):
                    self._copy(half, slot, stream, page).wait()

            return word | lax.shift_left(live.astype(jnp.int32), slot)

        return self._each_slot(slot, np.int32(0))

    def _each_slot(self, step: Any, carry: Any) -> Any:
        """step(slot, carry) for each; written out for the compiler, a loop in the interpreter."""
        if self.options.interpret:
            return lax.fori_loop(np.int32(0), np.int32(self.block), step, carry)
        for slot in range(self.block):
            carry = step(np.int32(slot), carry)
        return carry

    def clear_tail(self, half: Any, first: Any, keys: Any) -> None:
        """Values of slots past the sequence's end are 0: what a freed page held may be NaN, and 0 times NaN is NaN."""
        page = self.geometry.page
        tail = lax.rem(keys, np.int32(page))
        slot = lax.div(keys, np.int32(page)) - first

        @pl.when((tail != 0) & (slot >= 0) & (slot < self.block))
        def _clear() -> None:
            buffer = self.refs[f"{self.last}_buffer"]
            axis = 0 if self.geometry.layout == "split" else 1
            held = buffer[half, slot]
            wide = held if held.dtype == jnp.float32 else held.astype(jnp.float32)
            inside = lax.broadcasted_iota(jnp.int32, wide.shape, axis) < tail
            buffer[half, slot] = jnp.where(inside, wide, 0.0).astype(buffer.dtype)

    def key(self, half: Any, head: Any) -> jax.Array:
        """Keys of a kv head, [keys of the block, dim]."""
        return self._rows("key", half, head, self.geometry.key_lanes)

    def value(self, half: Any, head: Any) -> jax.Array:
        """Values of a kv head."""
        return self._rows(self.last, half, head, self.geometry.value_lanes)

    def scale_rows(self, name: str, half: Any, valid: jax.Array) -> jax.Array:
        """Scales of the block's keys, [kv_heads, keys]; 0 where not valid [1, keys].

        The pages' slots are spread over the lanes by a product with ones and zeros; exact, as each sum has one term.
        """
        geometry, size = self.geometry, self.block
        page, kv_heads = geometry.page, geometry.kv_heads
        held = self.refs[f"{name}_buffer"][half]
        held = jnp.where(jnp.abs(held) < jnp.inf, held, 0.0)  # a slot of nobody must not reach another's sum
        dot = functools.partial(lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        if geometry.layout == "split":
            held = held.reshape(size * page, kv_heads)
            own = [lax.broadcasted_iota(jnp.int32, (kv_heads, kv_heads), axis) for axis in (0, 1)]
            turned = dot(jnp.where(own[0] == own[1], 1.0, 0.0), held, (((1,), (1,)), ((), ())))
            return jnp.where(valid, turned, 0.0)
        held = held.reshape(size * kv_heads, page)
        lane = lax.broadcasted_iota(jnp.int32, (page, size * page), 1)
        spot = lax.broadcasted_iota(jnp.int32, (page, size * page), 0)
        spread = jnp.zeros((page, size * page), jnp.float32)
        for slot in range(size):
            spread = jnp.where(lane == spot + slot * page, 1.0, spread)
        wide = dot(held, spread, (((1,), (0,)), ((), ())))
        lanes = lax.broadcasted_iota(jnp.int32, (kv_heads, size * page), 1)
        rows = jnp.zeros((kv_heads, size * page), jnp.float32)
        for slot in range(size):
            own = (lanes >= slot * page) & (lanes < (slot + 1) * page)
            rows = jnp.where(own, wide[slot * kv_heads : (slot + 1) * kv_heads], rows)
        return jnp.where(valid, rows, 0.0)

    def _rows(self, name: str, half: Any, head: Any, lanes: tuple[int, int]) -> jax.Array:
        buffer, lane = self.refs[f"{name}_buffer"], slice(*lanes)
        if self.geometry.layout == "split":
            held = buffer[half, :, :, head, lane]
        else:
            held = buffer[half, :, head, :, lane]
        rows = held.reshape(self.block * self.geometry.page, lanes[1] - lanes[0])
        return as_factor(rows, self.geometry.compute_dtype)

    def _page(self, seq: Any, at: Any, end: Any) -> tuple[Any, Any]:
        """(whether it is fetched, its id)."""
        width = self.geometry.width
        page = self.refs["table"][seq * width + jnp.minimum(at, width - 1)]
        return (at < end) & (page >= 0) & (page < self.geometry.pages), page

    def _copy(self, half: Any, slot: Any, stream: int, page: Any) -> Any:
        name = self.names[stream]
        return pltpu.make_async_copy(
            self.refs[f"{name}_pages"].at[page],
            self.refs[f"{name}_buffer"].at[half, slot],
            self.refs["arrived"].at[half, stream],
        )


def as_factor(x: jax.Array, dtype: Any) -> jax.Array:
    """int8 and fp8 by way of float32, exactly: there is no direct way on each generation."""
    if x.dtype == dtype:
        return x
    return x.astype(jnp.float32).astype(dtype)


def walk(pages: Pages, words: Any, number: Any, count: Any, visit: Any, carry: Any) -> Any:
    """Call visit(half, first page, live word, carry) for each block of pages of a unit.

    While a block is visited the next one is on its way: of this unit or, at its end, of the next.
    """
    unit, half = Unit.read(words, number), pages.refs["half"]
    following = Unit.read(words, jnp.minimum(number + 1, count - 1))
    size = np.int32(pages.block)

    @pl.when(number == 0)
    def _first() -> None:
        half[0] = np.int32(0)
        pages.start(np.int32(0), unit.seq, unit.first, unit.end)

    trips = lax.div(unit.end - unit.first + (size - 1), size)
    begun = half[0]

    def step(block: Any, carry: Any) -> Any:
        here = lax.rem(begun + block, np.int32(2))
        first = unit.first + block * size
        more = block + 1 < trips
        pick = lambda mine, other: jnp.where(more, mine, other)  # noqa: E731

        @pl.when(more | (number + 1 < count))
        def _next() -> None:
            pages.start(
                1 - here,
                pick(unit.seq, following.seq),
                pick(first + size, following.first),
                pick(unit.end, following.end),
            )

        word = pages.wait(here, unit.seq, first, unit.end)
        pages.clear_tail(here, first, unit.keys)
        return visit(here, first, word, carry)

    carry = lax.fori_loop(np.int32(0), trips, step, carry)
    half[0] = lax.rem(begun + trips, np.int32(2))
    return carry
