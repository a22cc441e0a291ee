"""Writing a decoding row's own key and value: into the block of pages in VMEM that has their place, and from there to HBM.

A page is written back in whole tiles. Their other numbers are as they were fetched; no other sequence may own the page.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .geometry import HBM_ROWS, LANES, Geometry, sublanes
from .work_items import WorkItem

__all__ = ["Writer", "row_block", "write_scratch"]

_SCALES = ("key_scale", "value_scale")


def written_shape(geometry: Geometry, name: str) -> tuple[int, ...]:
    """What is written of a page: the row itself where rows are whole tiles, else its tile, or the page if it isn't whole ones;
    all of a page's scales."""
    shape, dtype = geometry.streams()[name]
    if name in _SCALES:
        return shape
    if geometry.tokens_first:
        return 1, *shape[1:]
    if geometry.in_tiles(name):
        return geometry.kept(name, HBM_ROWS)
    kv_heads, page, row = shape
    tile = sublanes(dtype)
    return kv_heads, page if page % tile else tile, row


def row_block(geometry: Geometry, name: str) -> tuple[int, ...]:
    """The form in which the kernel takes a token's own numbers; scales so that they broadcast to a page's."""
    if name in _SCALES:
        return (1, geometry.kv_heads) if geometry.tokens_first else (geometry.kv_heads, LANES)
    return geometry.row_block(name)


def write_scratch(geometry: Geometry) -> dict[str, Any]:
    """Two copies of what is being written, by even and by odd work items."""
    streams = geometry.streams()
    scratch: dict[str, Any] = {
        f"{name}_written": pltpu.VMEM((2, *written_shape(geometry, name)), dtype)
        for name, (_, dtype) in streams.items()
    }
    return scratch | {
        "leaving": pltpu.SemaphoreType.DMA((2, len(streams))),
        "left": pltpu.SMEM((2, 3), jnp.int32),  # for each copy: whether it is being written, its page and first row
    }


class Writer:
    """Writes the row of one work item at a time."""

    def __init__(self, geometry: Geometry, refs: dict[str, Any], number: Any) -> None:
        self.geometry, self.refs, self.number = geometry, refs, number
        self.half = lax.rem(number, np.int32(2))

        @pl.when(number == 0)
        def _none_yet() -> None:
            refs["left"][0, 0] = refs["left"][1, 0] = np.int32(0)

    def row(self, slot: Any, place: Any, item: WorkItem, page: Any) -> None:
        """Put a work item's own row into page `place` of the block in `slot`, and start writing it to page id `page`."""
        self._wait(self.half)
        at = lax.rem(item.position, np.int32(self.geometry.page))
        left = self.refs["left"]
        left[self.half, 0], left[self.half, 1], left[self.half, 2] = np.int32(1), page, at
        for name in self.geometry.streams():
            self._merge(name, slot, place, at)
        for copy in self._copies(self.half):
            copy.start()

    def finish(self) -> None:
        """After the last work item: wait for everything that is being written."""
        self._wait(np.int32(0))
        self._wait(np.int32(1))

    def _merge(self, name: str, slot: Any, place: Any, at: Any) -> None:
        geometry, buffer = self.geometry, self.refs[f"{name}_buffer"]
        written, row = self.refs[f"{name}_written"], self.refs[f"{name}_row"][...]
        if name not in _SCALES and geometry.tokens_first:
            buffer[slot, place, at] = row
            written[self.half, 0] = row
            return
        index: tuple[Any, ...] = (slot, place)
        if name in _SCALES:
            axis, spot = (0, at) if geometry.tokens_first else (1, at)
            shape = written.shape[1:]
            if not geometry.tokens_first:
                row = jnp.tile(row, (1, -(-shape[1] // LANES)))[:, : shape[1]]
        elif geometry.in_tiles(name):
            axis, shape = 2, written.shape[1:]
            number = lax.div(at, np.int32(HBM_ROWS))
            index, row = (slot, place, slice(None), pl.ds(number, 1)), row[:, None, None, :]
            spot = at - number * np.int32(HBM_ROWS)
        else:
            axis, shape = 1, written.shape[1:]
            first = self._first(name, at)
            index, spot, row = (slot, place, slice(None), pl.ds(first, shape[1])), at - first, row[:, None, :]
        tile = buffer[index]
        here = lax.broadcasted_iota(jnp.int32, shape, axis) == spot
        merged = jnp.where(here, _wide(row), _wide(tile)).astype(buffer.dtype)
        buffer[index] = merged
        written[self.half] = merged

    def _first(self, name: str, at: Any) -> Any:
        """The first row of the tile of row `at`."""
        rows = written_shape(self.geometry, name)[1]
        if rows == self.geometry.page:
            return 0
        return pl.multiple_of(lax.div(at, np.int32(rows)) * np.int32(rows), rows)

    def _copies(self, half: Any) -> list[Any]:
        page, at = self.refs["left"][half, 1], self.refs["left"][half, 2]
        copies = []
        for stream, name in enumerate(self.geometry.streams()):
            target = self.refs[f"{name}_pages"].at[page]
            if name not in _SCALES and self.geometry.tokens_first:
                target = target.at[pl.ds(at, 1)]
            elif self.geometry.in_tiles(name):
                target = target.at[:, pl.ds(lax.div(at, np.int32(HBM_ROWS)), 1)]
            elif name not in _SCALES:
                rows = written_shape(self.geometry, name)[1]
                target = target.at[:, pl.ds(self._first(name, at), rows)]
            gone = self.refs["leaving"].at[half, stream]
            copies.append(pltpu.make_async_copy(self.refs[f"{name}_written"].at[half], target, gone))
        return copies

    def _wait(self, half: Any) -> None:
        @pl.when(self.refs["left"][half, 0] == 1)
        def _gone() -> None:
            for copy in self._copies(half):
                copy.wait()
            self.refs["left"][half, 0] = np.int32(0)


def _wide(x: jax.Array) -> jax.Array:
    """Selections are made in float32, which holds every stored dtype exactly."""
    return x if x.dtype == jnp.float32 else x.astype(jnp.float32)
