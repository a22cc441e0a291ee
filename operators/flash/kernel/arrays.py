"""A pass's arrays: passed to a kernel by name, and sliced into tiles there.

Pallas' interpreter shifts a slice that goes beyond an array's end, whereas a GPU masks it. So for the interpreter arrays are
padded to whole blocks, with numbers that would be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ....compat import varying_as
from ...kernels.derivatives import once
from ...kernels.varying import vary, varying
from .flash_sizes import DimPart, TileSizes

__all__ = ["KERNELS", "Along", "Arrays", "index"]

KERNELS = "flash_attn2's kernels"  # in an error


def index(n: Any) -> Any:
    """An array index for masked loads: 32-bit, and not a Python number, as it is on a grid axis of size 1."""
    return np.int32(n) if isinstance(n, int) else n


@dataclass(frozen=True)
class Along:
    """Rows of a sequence in a tile: `count` rows from `start` on, out of `length`. inside: the tile that they are a part of."""

    start: Any
    count: int
    length: int
    inside: Along | None = None

    @property
    def indices(self) -> jax.Array:
        """Their numbers."""
        return self.start + jnp.arange(self.count, dtype=jnp.int32)

    @property
    def beyond(self) -> bool:
        """Whether some tile goes beyond the end."""
        return self.length % self.whole.count != 0

    @property
    def whole(self) -> Along:
        """The tile."""
        return self.inside or self

    def parts(self, number: int) -> list[Along]:
        """Equal parts, one after the other."""
        count = self.count // number
        return [Along(self.start + i * count, count, self.length, self.whole) for i in range(number)]


@dataclass
class Arrays:
    """A kernel's inputs and outputs, by name."""

    sizes: TileSizes
    layout: str
    interpret: bool
    inputs: dict[str, jax.Array | np.ndarray] = field(default_factory=dict)
    outputs: dict[str, tuple[tuple[int, ...], Any]] = field(default_factory=dict)

    # -- into the kernel ---------------------------------------------------------------------------------------------

    def add(self, name: str, x: jax.Array, along: dict[int, int], parts: tuple[DimPart, ...] = ()) -> None:
        """An array whose axes `along` are split into blocks; `parts`: of its last axis, that of a head's numbers."""
        if self.interpret:
            short = [-n % along.get(axis, 1) for axis, n in enumerate(x.shape)]
            short[-1] += _beyond(parts)
            if any(short):
                x = jnp.pad(x, [(0, n) for n in short], constant_values=_noticed(x.dtype))
        self.inputs[name] = x

    def add_by_blocks(self, name: str, x: jax.Array) -> None:
        """[batch, heads, q, kv], any of them 1."""
        sizes = {2: self.sizes.block_q, 3: self.sizes.block_kv}
        self.add(name, x, {axis: size for axis, size in sizes.items() if x.shape[axis] > 1})

    def rows_of_heads(self, name: str, x: jax.Array, block: int, parts: tuple[DimPart, ...]) -> None:
        """[batch, time, heads, dim], or in the layout's order."""
        self.add(name, x, {self.layout.index("t"): block}, parts)

    def row_numbers(self, name: str, x: jax.Array, block: int) -> None:
        """[batch, heads, time]."""
        self.add(name, x, {2: block})

    def output(
        self, name: str, shape: tuple[int, ...], dtype: Any, along: dict[int, int], parts: tuple[DimPart, ...] = ()
    ) -> None:
        """An array that the kernel writes."""
        if self.interpret:
            whole = [-(-n // along.get(axis, 1)) * along.get(axis, 1) for axis, n in enumerate(shape)]
            shape = (*whole[:-1], whole[-1] + _beyond(parts))
        self.outputs[name] = (shape, dtype)

    def run(self, name: str, kernel: Callable[[dict[str, Any]], None], grid: tuple[int, ...]) -> dict[str, jax.Array]:
        """Run the kernel over the grid; returns the outputs by name, with padding."""
        arrays = [jnp.asarray(x) for x in self.inputs.values()]
        axes = varying(arrays)
        arrays = once([vary(x, axes) for x in arrays], KERNELS)
        names = (*self.inputs, *self.outputs)
        call = pl.pallas_call(
            lambda *refs: kernel(dict(zip(names, refs, strict=True))),
            out_shape=[varying_as(arrays[0], shape, dtype) for shape, dtype in self.outputs.values()],
            grid=grid,
            compiler_params=plgpu.CompilerParams(num_warps=self.sizes.num_warps, num_stages=self.sizes.num_stages),
            interpret=self.interpret,
            name=name,
        )
        # With jax_enable_x64 a Python number among the indices would be 64-bit. Inputs and outputs have 32 bits or fewer.
        with jax.enable_x64(False):
            results = call(*arrays)
        return dict(zip(self.outputs, results, strict=True))

    # -- in the kernel -----------------------------------------------------------------------------------------------

    def tile(
        self,
        ref: Any,
        batch: Any,
        head: Any,
        along: Along,
        parts: tuple[DimPart, ...],
        bounded: bool = True,
        keep: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Rows of a head, [rows, width] for each part of the dim; 0 beyond the ends, and where `keep` [rows] is False.

        bounded: some rows may be beyond.
        """
        return [self._load(ref, batch, head, along, part, bounded, keep) for part in parts]

    def put_tile(
        self, ref: Any, batch: Any, head: Any, along: Along, parts: tuple[DimPart, ...], values: list[jax.Array]
    ) -> None:
        """Write what `tile` would read."""
        for part, value in zip(parts, values, strict=True):
            inside = self._inside(along, part, True)
            plgpu.store(ref.at[self._place(batch, head, along, part)], value.astype(ref.dtype), mask=inside)

    def _load(
        self,
        ref: Any,
        batch: Any,
        head: Any,
        along: Along,
        part: DimPart,
        bounded: bool,
        keep: jax.Array | None,
    ) -> jax.Array:
        inside = self._inside(along, part, bounded)
        if keep is not None:
            rows = jnp.broadcast_to(keep[:, None], (along.count, part.width))
            inside = rows if inside is None else inside & rows
        other = None if inside is None else 0
        return plgpu.load(ref.at[self._place(batch, head, along, part)], mask=inside, other=other)

    def _place(self, batch: Any, head: Any, along: Along, part: DimPart) -> tuple[Any, ...]:
        batch, head = index(batch), index(head)
        # Pallas refuses a slice that is known to end beyond the array; here the rest is masked.
        start = index(part.start) if part.inside == part.width else jnp.arange(part.start, part.start + 1)[0]
        rows, cols = pl.ds(along.start, along.count), pl.ds(start, part.width)
        return (batch, rows, head, cols) if self.layout == "bthd" else (batch, head, rows, cols)

    def _inside(self, along: Along, part: DimPart, bounded: bool) -> jax.Array | None:
        shape, inside = (along.count, part.width), None
        if bounded and along.beyond:
            inside = jnp.broadcast_to((along.indices < along.length)[:, None], shape)
        if part.inside < part.width:
            cols = jnp.broadcast_to((jnp.arange(part.width) < part.inside)[None], shape)
            inside = cols if inside is None else inside & cols
        return inside

    @staticmethod
    def numbers(ref: Any, place: tuple[Any, ...], along: Along, other: float = 0) -> jax.Array:
        """One number per row, [rows], from an array whose last axis is the rows."""
        inside = along.indices < along.length if along.beyond else None
        view = ref.at[(*map(index, place), pl.ds(along.start, along.count))]
        return plgpu.load(view, mask=inside, other=None if inside is None else other)

    @staticmethod
    def put_numbers(ref: Any, place: tuple[Any, ...], along: Along, values: jax.Array) -> None:
        """Write what `numbers` would read."""
        inside = along.indices < along.length if along.beyond else None
        plgpu.store(ref.at[(*map(index, place), pl.ds(along.start, along.count))], values, mask=inside)


def _beyond(parts: tuple[DimPart, ...]) -> int:
    return parts[-1].width - parts[-1].inside if parts else 0


def _noticed(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.nan
    return 1 if dtype == jnp.int8 else np.iinfo(dtype).max
