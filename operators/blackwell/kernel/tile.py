"""The tile of a warpgroup on Blackwell: 128 rows, one of a thread, as tensor memory is read."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....masks import Causal, Mask
from ...kernels.evaluated_leaf import EvaluatedLeaf
from ...mosaic.kernel.tile import MosaicTile
from ...mosaic.kernel.within import ThreadColumns
from .blackwell_sizes import ROWS

__all__ = ["BY_ROW", "OUTPUT", "TILE", "BlackwellTile", "by_row"]

TILE = plgpu.Layout.TCGEN05_TMEM_NATIVE
BY_ROW = TILE.reduce(1)  # one number a row
OUTPUT = plgpu.Layout.TCGEN05  # what can be written to swizzled shared memory


def by_row(x: Any) -> jax.Array:
    """A number for each row."""
    rows: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), BY_ROW)
    return rows


class BlackwellTile(MosaicTile):
    """A part of a warpgroup's tile. A thread has one of its lines: counted from the first key, the numbers of keys are known
    when the kernel is compiled."""

    lines: ClassVar[int] = ROWS
    in_registers: ClassVar[Any] = TILE
    of_thread: ClassVar[ThreadColumns] = ThreadColumns(period=1, together=1, rows=1, used=6)

    @property
    def takes_spans(self) -> bool:
        """See MosaicTile. One comparison for each number takes less than the words do by keys, and beside a soft cap, where two
        softmaxes share the registers."""
        compared = self.axis["q"] or (self.logits.soft_cap is not None and self.block_q > ROWS)
        return super().takes_spans and not (compared and self._is_causal)

    @property
    def _is_causal(self) -> bool:
        return len(self.parts) == 1 and isinstance(self.parts[0], Causal)

    def _tested(self, mask: Mask, rows: Any, positions: Any, keys: Any) -> Any:
        """See TileMask. Where several tests go by the numbers of keys, which would be kept then; beside arrays of keys they are
        anyway."""
        several = mask.children() or self.static_args.kv_len % self.block_kv
        if self.axis["q"] or not several or any(name.startswith("leaf") for name in self.refs):
            return super()._tested(mask, rows, positions, keys)
        first = self._global_keys(self.first["kv"])
        near = rows - first, positions - first, keys - first
        seen = mask.map_leaves(lambda leaf: EvaluatedLeaf(leaf.test(*near)) if leaf.by_distance else leaf)
        return seen.test(rows, positions, keys)
