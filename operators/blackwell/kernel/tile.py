"""The tile of a warpgroup on Blackwell: 128 rows, one of a thread, as tensor memory is read."""

from __future__ import annotations

from typing import Any, ClassVar

from jax.experimental.pallas import mosaic_gpu as plgpu

from ...mosaic.kernel.tile import MosaicTile
from .blackwell_sizes import ROWS

__all__ = ["BY_ROW", "OUTPUT", "TILE", "BlackwellTile"]

TILE = plgpu.Layout.TCGEN05_TMEM_NATIVE
BY_ROW = TILE.reduce(1)  # one number a row
OUTPUT = plgpu.Layout.TCGEN05  # what can be written to swizzled shared memory


class BlackwellTile(MosaicTile):
    """A part of a warpgroup's tile."""

    lines: ClassVar[int] = ROWS
    in_registers: ClassVar[Any] = TILE
