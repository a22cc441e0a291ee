"""A warpgroup's tile of the Hopper kernel over pages, as `weigh` takes it: rows have positions and query heads of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....hopper.kernel.hopper_sizes import ROWS
from ....hopper.kernel.tile import BY_ROW, TILE
from ...tile_mask import TileLogits

__all__ = ["PageTile", "along_rows", "by_row", "of_rows"]

_OF_HEADS = "capture"  # how the names of a score's arrays begin, as in flash.kernel.score_tile


def of_rows(refs: dict[str, Any], tile_of_rows: Any, head: Any, rows: Any) -> dict[str, jax.Array]:
    """What a score reads of rows, a number for each: it stays in registers while a block goes through its keys."""
    found = {name: ref.at[head, rows] for name, ref in refs.items() if name.startswith(_OF_HEADS) or name == "heads"}
    if "positions" in refs:
        found["positions"] = refs["positions"].at[tile_of_rows, rows]
    return {name: by_row(ref) for name, ref in found.items()}


class PageTile:
    """scale: of its keys, a number or one for each column; None if they have none. numbers: those of `of_rows`. sequence: the
    batch row; first: the first key, counted over the device's own pages of `page` tokens."""

    def __init__(
        self,
        logits: TileLogits,
        refs: dict[str, Any],
        seen: list[jax.Array],
        shape: tuple[int, ...],
        scale: Any,
        numbers: dict[str, jax.Array],
        sequence: Any,
        first: Any,
        page: int,
    ) -> None:
        self.logits, self.static_args, self.seen, self.shape = logits, logits.static_args, seen, shape
        self.scale, self.refs = scale, refs if scale is None else refs | {"key_scale": scale}
        self.numbers, self.sequence, self.first, self.page = numbers, sequence, first, page

    def visible(self) -> list[jax.Array]:
        """The tests that a visible key passes."""
        return self.seen

    def key_scale(self) -> Any:
        """The scale of each key."""
        return self.scale

    def dense(self, name: str) -> jax.Array:
        """A score's array by query heads."""
        return along_rows(self.numbers[name], self.shape)

    def row_and_head(self) -> tuple[Any, Any]:
        """The batch row, and each row's query head in the whole problem."""
        return self.sequence, along_rows(self.numbers["heads"], self.shape)

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """Of queries and keys in their sequence."""
        keys = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=TILE) + self.first
        if "shard" in self.refs:  # every `stride`-th page is this device's
            shard, stride = (self.refs["shard"][n] for n in range(2))
            bits = self.page.bit_length() - 1
            keys = ((((keys >> bits) * stride) + shard) << bits) + (keys & (self.page - 1))
        return along_rows(self.numbers["positions"], self.shape), keys


def by_row(ref: Any) -> jax.Array:
    """A number for each row of a group, from a reference [rows]."""
    assert ref.shape == (ROWS,)
    rows: jax.Array = plgpu.load(ref, layout=BY_ROW, optimized=False)  # type: ignore[call-arg] # of jax 0.10
    return rows


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row, along it."""
    return lax.broadcast_in_dim(x, shape, (0,))
