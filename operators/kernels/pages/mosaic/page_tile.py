"""A tile of a kernel over pages, or a part of it, as `weigh` takes it: rows have positions and query heads of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....mosaic.kernel.block import along_rows
from ....mosaic.kernel.gather import gathered
from ....mosaic.kernel.ptx import reciprocal
from ....mosaic.kernel.seen_parts import ALL_SEEN, SeenParts
from ....mosaic.kernel.tile import MosaicLogits

__all__ = ["PageTile", "score_rows", "table_name"]

_OF_HEADS = "capture"  # how the names of a score's arrays begin, as in flash.kernel.score_tile


def table_name(name: str) -> str:
    """Of a table whose heads' places have this name."""
    return f"table_of_{name}"


def score_rows(refs: dict[str, Any], tile_of_rows: Any, head: Any, rows: Any) -> dict[str, Any]:
    """References to what a score reads of rows, a number for each."""
    found = {name: ref.at[head, rows] for name, ref in refs.items() if name.startswith(_OF_HEADS) or name == "heads"}
    return found | ({"positions": refs["positions"].at[tile_of_rows, rows]} if "positions" in refs else {})


@dataclass(frozen=True)
class PageTile:
    """scale: of its keys, a number or one for each column; None if they have none. numbers: those of `score_rows`. sequence: the
    batch row; first: the first key, counted over the device's own pages of `page` tokens. layout: in registers. value_scale: that
    of each column's value, where it has one; one that no row sees may be NaN."""

    logits: MosaicLogits
    of_block: dict[str, Any]  # references
    seen: list[jax.Array]
    shape: tuple[int, ...]
    scale: Any
    numbers: dict[str, jax.Array]
    sequence: Any
    first: Any
    page: int
    layout: Any
    value_scale: Callable[[], jax.Array | None] = lambda: None

    @property
    def static_args(self) -> Any:
        """What is known at trace time."""
        return self.logits.static_args

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """1 / x of numbers of the tile from 1 on."""
        return reciprocal(x, self.layout, interpret=self.logits.interpret)

    @property
    def refs(self) -> dict[str, Any]:
        """What there is, by name."""
        return self.of_block if self.scale is None else self.of_block | {"key_scale": self.scale}

    def visible(self) -> list[jax.Array]:
        """The tests that a visible key passes."""
        return self.seen

    def seen_parts(self, count: int, *, ask: bool = True) -> SeenParts:
        """`visible` has all tests."""
        del count, ask
        return ALL_SEEN

    def key_scale(self) -> Any:
        """The scale of each key."""
        return self.scale

    def dense(self, name: str) -> jax.Array:
        """A score's array by query heads."""
        return along_rows(self.numbers[name], self.shape)

    def of_table(self, name: str, index: jax.Array) -> jax.Array:
        """Numbers of a Lookup's array, by their places in a head's; those beyond an end read what is there."""
        table = self.of_block[table_name(name)]
        places = along_rows(self.numbers[name], self.shape) + jnp.clip(index, 0, table.shape[1] - 1)
        return gathered(table, places, self.layout, self.logits.interpret)

    def row_and_head(self) -> tuple[Any, Any]:
        """The batch row, and each row's query head in the whole problem."""
        return self.sequence, along_rows(self.numbers["heads"], self.shape)

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """Of queries and keys in their sequence."""
        keys = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layout) + self.first
        if "shard" in self.refs:  # every `stride`-th page is this device's
            shard, stride = (self.refs["shard"][n] for n in range(2))
            bits = self.page.bit_length() - 1
            keys = ((((keys >> bits) * stride) + shard) << bits) + (keys & (self.page - 1))
        return along_rows(self.numbers["positions"], self.shape), keys

    def keep(self) -> None:
        """There is no dropout."""

    def dropped(self, x: jax.Array, keep: None) -> jax.Array:
        """Weights times the scales of their values."""
        del keep
        scale = self.value_scale()
        if scale is None:
            return x
        x = x * scale
        return jnp.where(self.seen[0], x, 0.0) if self.seen else x
