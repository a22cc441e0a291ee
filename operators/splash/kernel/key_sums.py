"""The gradients of key and value in the fused backward pass: sums in VMEM for all keys of a head, written to HBM by DMA.

The pipeline would keep a block of the output, twice, as long as the sums. Instead a few rows at a time are scaled, turned and
cast in a buffer of their own, from where they leave while the next ones are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .grid import Input, KernelGrid, Output

__all__ = ["KeySums", "add_key_sums", "leaving_rows"]

_NAMES = ("key", "value")
_ROWS = (512, 256, 128)
_BUFFERS = 2  # one is filled while the other one is written


def leaving_rows(rows: int, first: int = 0) -> int:
    """How many of so many keys, of which the first is key `first`, leave at a time; both are multiples of 128."""
    return next(n for n in _ROWS if rows % n == 0 and first % n == 0)


def add_key_sums(
    grid: KernelGrid,
    keys: range,
    dims: Mapping[str, int],
    dtype: Any,
    transposed: bool,
    whole: int,
    before: dict[str, jax.Array] | None,
) -> None:
    """Add d_key [batch, kv heads, whole, dim] and d_value, which stay in HBM, and the sums of some of their keys.

    dims: of key and value, without the latter where it is a part of the former. before: both as the pass over earlier keys left
    them; this pass writes its own rows into them.
    """
    anywhere = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    rows = len(keys)
    assert keys.stop <= whole, "a copy beyond the end would write over something else"
    at_a_time = leaving_rows(rows, keys.start)
    for name, dim in dims.items():
        shape = (grid.batch, grid.heads.kv_heads, whole, dim)
        grid.outputs[f"d_{name}"] = Output(shape, dtype, anywhere, rows / whole)
        if before is not None:
            grid.inputs[f"d_{name}_before"] = Input(before[f"d_{name}"], anywhere, "none")
            grid.aliased[f"d_{name}_before"] = f"d_{name}"
        sums = (dim, rows) if transposed else (rows, dim)
        grid.scratch[f"{name}_sum"] = pltpu.VMEM((grid.heads.kv_tile, *sums), jnp.float32)
        grid.scratch[f"{name}_leaving"] = pltpu.VMEM((_BUFFERS, at_a_time, dim), dtype)
    grid.scratch["left"] = pltpu.SemaphoreType.DMA((_BUFFERS, len(dims)))


class KeySums:
    """The sums of a kernel's keys, of which the first is key `first` of the head."""

    def __init__(self, refs: dict[str, Any], grid: KernelGrid, transposed: bool, first: int) -> None:
        self.refs, self.grid, self.transposed, self.first = refs, grid, transposed, first
        self.names = tuple(name for name in _NAMES if f"d_{name}" in refs)
        rows = refs["key_sum"].shape[2 if transposed else 1]
        self.at_a_time = leaving_rows(rows, first)
        self.parts = rows // self.at_a_time

    def clear(self) -> None:
        """Start with zeros."""

        def part(number: Any, head: Any, rows: Any) -> None:
            for name in self.names:
                at = self._at(name, head, rows)
                at[...] = jnp.zeros(at.shape, jnp.float32)

        self._each(part)

    def leave(self, batch: Any, kv_tile: Any, scales: dict[str, float]) -> None:
        """Write the sums, each times its scale, to this batch row and these kv heads; returns when they have arrived."""
        kv_heads = self.grid.heads.kv_tile

        def copies(number: Any, head: Any, start: Any) -> list[Any]:
            slot = lax.rem(number, np.int32(_BUFFERS))
            rows = pl.ds(pl.multiple_of(self.first + start, self.at_a_time), self.at_a_time)
            return [
                pltpu.make_async_copy(
                    self.refs[f"{name}_leaving"].at[slot],
                    self.refs[f"d_{name}"].at[batch, kv_tile * kv_heads + head, rows],
                    self.refs["left"].at[slot, stream],
                )
                for stream, name in enumerate(self.names)
            ]

        def part(number: Any, head: Any, start: Any) -> None:
            # A wait counts bytes, which are the same for every part.
            pl.when(number >= _BUFFERS)(lambda: self._wait(copies(number, head, start)))
            slot = lax.rem(number, np.int32(_BUFFERS))
            for name in self.names:
                sums = self._at(name, head, start)[...]
                leaving = self.refs[f"{name}_leaving"]
                sums = sums.T if self.transposed else sums
                leaving[slot] = (sums * scales[name]).astype(leaving.dtype)
            for copy in copies(number, head, start):
                copy.start()

        self._each(part)
        for number in range(min(_BUFFERS, kv_heads * self.parts)):
            self._wait(copies(np.int32(number), 0, 0))

    @staticmethod
    def _wait(copies: list[Any]) -> None:
        for copy in copies:
            copy.wait()

    def _at(self, name: str, head: Any, start: Any) -> Any:
        rows = pl.ds(pl.multiple_of(start, self.at_a_time), self.at_a_time)
        sums = self.refs[f"{name}_sum"]
        return sums.at[head, :, rows] if self.transposed else sums.at[head, rows, :]

    def _each(self, part: Callable[[Any, Any, Any], None]) -> None:
        """Call with (number, kv head of the tile, first key) of all parts, in a loop: unrolled, long sequences take long to
        compile.
        """

        def turn(number: Any, carry: None) -> None:
            part(
                number,
                lax.div(number, np.int32(self.parts)),
                lax.rem(number, np.int32(self.parts)) * np.int32(self.at_a_time),
            )

        lax.fori_loop(np.int32(0), np.int32(self.grid.heads.kv_tile * self.parts), turn, None)
