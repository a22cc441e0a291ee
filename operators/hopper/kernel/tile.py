"""The tile of a warpgroup on Hopper: 64 rows, or 64 keys, as wgmma leaves its sums in registers."""

from __future__ import annotations

from typing import Any, ClassVar

from jax.experimental.pallas import mosaic_gpu as plgpu

from ...mosaic.kernel.tile import MosaicTile
from ...mosaic.kernel.within import ThreadColumns
from .hopper_sizes import ROWS

__all__ = ["BY_COLUMN", "BY_ROW", "TILE", "HopperTile"]

TILE = plgpu.Layout.WGMMA
BY_ROW = TILE.reduce(1)  # one number a row
BY_COLUMN = TILE.reduce(0)  # one number a column


class HopperTile(MosaicTile):
    """A warpgroup's tile."""

    lines: ClassVar[int] = ROWS
    in_registers: ClassVar[Any] = TILE
    of_thread: ClassVar[ThreadColumns] = ThreadColumns(period=8, together=2, rows=2, used=8)
