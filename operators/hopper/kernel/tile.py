"""The tile of a warpgroup: its mask, and the arrays that go along its rows and keys.

Numbers of rows and keys have the tile's whole shape: the layouts of a warpgroup's registers know no tile of one row. The compiler
computes each of them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....masks import Mask, Not
from ...kernels.tile_mask import TileLogits, TileMask

__all__ = ["BY_KEY", "BY_ROW", "TILE", "HopperTile"]

TILE = plgpu.Layout.WGMMA  # how a tile's numbers lie in the registers of a warpgroup
BY_ROW = TILE.reduce(1)  # one number a row
BY_KEY = TILE.reduce(0)  # one number a key


class _Negated(Mask):
    """Visible where the mask is not. Mosaic GPU has no negation of booleans."""

    kind = "negated"

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def children(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def with_children(self, children: Sequence[Mask]) -> Mask:
        return _Negated(children[0])

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return self.mask.test(rows, positions, cols) ^ True


def _with_negations(mask: Mask) -> Mask:
    if not mask.children():
        return mask
    children = [_with_negations(child) for child in mask.children()]
    return _Negated(children[0]) if isinstance(mask, Not) else mask.with_children(children)


class HopperTile(TileMask):
    """Rows and keys of a query head, [rows, keys]. first_row, first_key: where they begin on this device."""

    def __init__(
        self,
        logits: TileLogits,
        refs: dict[str, Any],
        batch: Any,
        head: Any,
        first_row: Any,
        first_key: Any,
        shape: tuple[int, int],
        padded: bool,
    ) -> None:
        super().__init__(logits.static_args, refs, batch)
        self.logits, self.head = logits, head
        self.first_row, self.first_key, self.shape, self.padded = first_row, first_key, shape, padded

    def visible(self) -> list[jax.Array]:
        """The tests that a visible key passes, each [rows, keys]."""
        keys = self._local_keys()
        seen = self._tests(_with_negations(self.static_args.mask), self._local_rows(), self._global_keys(keys))
        if self.padded:
            seen.append(keys < self.static_args.kv_len)
        return seen

    def positions(self) -> tuple[Any, Any]:
        """Positions of queries and keys, each [rows, keys]."""
        leaf = self.positions_leaf()
        if leaf is not None:
            return self._along(f"leaf{leaf}", "q"), self._along(f"leaf{leaf + 1}", "kv")
        return self.position(self._global_rows(self._local_rows())), self._global_keys(self._local_keys())

    def _local_rows(self) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=TILE) + self.first_row

    def _local_keys(self) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=TILE) + self.first_key

    def _along(self, name: str, dim: str, *where: Any) -> jax.Array:
        """See TileMask."""
        ref = self.refs[name]
        place = (self.batch if ref.shape[0] > 1 else 0,)
        return self._rows_of(ref, place) if dim == "q" else self._spread(ref, place, self.first_key, 1)

    def _words(self, ref: Any, *where: Any) -> tuple[list[jax.Array], Any]:
        """See TileMask."""
        place = tuple(at if n > 1 else 0 for at, n in zip((self.batch, self.head), ref.shape[:2], strict=True))
        tile = lax.div(self.first_key, jnp.int32(self.shape[1]))
        return [self._rows_of(ref, (*place, tile, word)) for word in range(ref.shape[3])], self.first_key

    def _rows_of(self, ref: Any, place: tuple[Any, ...]) -> jax.Array:
        return self._spread(ref, place, self.first_row, 0)

    def _spread(self, ref: Any, place: tuple[Any, ...], first: Any, axis: int) -> jax.Array:
        """Numbers of an array's last axis, along an axis of the tile."""
        cut = ref.at[(*place, pl.ds(first, self.shape[axis]))]
        along = BY_KEY if axis else BY_ROW
        numbers: jax.Array = plgpu.load(cut, layout=along, optimized=False)  # type: ignore[call-arg] # of jax 0.10
        return lax.broadcast_in_dim(numbers, self.shape, (axis,))
