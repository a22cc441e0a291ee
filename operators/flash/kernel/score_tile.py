"""A score's steps on a tile of the GPU kernels: numbers by distance and tables are gathered from the caches of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ....scores.steps import Diagonal, Linear, Lookup, Product, Steps
from .arrays import Arrays

__all__ = ["TileScores", "add_captures"]


def _name(number: int) -> str:
    return f"capture{number}"


def add_captures(arrays: Arrays, steps: Steps, captures: tuple[jax.Array, ...]) -> None:
    """Add the arrays of a score's steps to a kernel's inputs."""
    for number, (x, form) in enumerate(zip(captures, steps.forms, strict=True)):
        if form == "aligned":
            arrays.add_by_blocks(_name(number), x)
        else:
            arrays.add(_name(number), x, {})


@dataclass(frozen=True)
class TileScores:
    """A ScoreTile of a kernel's tile: a Tile, or another kernel's with its methods."""

    tile: Any

    def aligned(self, number: int) -> jax.Array:
        """See ScoreTile."""
        return self.tile.dense(_name(number))

    def distance(self) -> jax.Array:
        """See ScoreTile."""
        q, kv = self.tile.positions()
        return abs((kv - q).astype(jnp.float32))

    def linear(self, step: Linear, unit: float) -> jax.Array:
        """See ScoreTile."""
        return self.aligned(step.reads[0]) * unit * self.distance()

    def diagonal(self, step: Diagonal, unit: float) -> jax.Array:
        """See ScoreTile."""
        numbers: jax.Array = self.tile.diagonal(_name(step.reads[0]), step.rows)
        return numbers * unit

    def lookup(self, step: Lookup, unit: float) -> jax.Array:
        """See ScoreTile."""
        q, kv = (jnp.broadcast_to(x, self.tile.shape) for x in self.tile.positions())
        numbers: jax.Array = self.tile.of_table(_name(step.reads[0]), step.index(q, kv))
        return numbers * unit

    def product(self, step: Product, unit: float) -> jax.Array:
        """See ScoreTile."""
        _, kv = self.tile.positions()
        numbers: jax.Array = self.tile.of_columns(_name(step.reads[0]), step.index(kv))
        return numbers * unit

    def places(self, shape: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
        """See ScoreTile."""
        every = (*self.tile.row_and_head(), *self.tile.positions())
        batch, head, q, kv = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in every)
        return batch, head, q, kv
