"""A score's steps on logits of rows against keys in pages: everything by the positions of a row and a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....scores.steps import Diagonal, Linear, Lookup, Product, Steps

__all__ = ["PageScores"]


@dataclass(frozen=True)
class PageScores:
    """A ScoreTile [..., kv heads, queries, group, keys]. row: the sequence's, [...]; q, kv: positions, [..., queries] and
    [..., keys]; head_start: this device's first query head."""

    steps: Steps
    arrays: tuple[jax.Array, ...]
    heads: tuple[int, int]  # kv heads and the query heads of each
    row: jax.Array
    q: jax.Array
    kv: jax.Array
    head_start: Any

    def _by_head(self, x: jax.Array) -> jax.Array:
        """[heads | 1, ...] as [kv heads | 1, group | 1, ...]."""
        return x.reshape(*(self.heads if x.shape[0] > 1 else (1, 1)), *x.shape[1:])

    def _spread(self, x: jax.Array) -> jax.Array:
        """[kv heads | 1, group | 1] in the tile's rank."""
        kv_heads, group = x.shape
        return x.reshape(*[1] * (self.q.ndim - 1), kv_heads, 1, group, 1)

    def _positions(self) -> tuple[jax.Array, jax.Array]:
        return self.q[..., None, :, None, None], self.kv[..., None, None, None, :]

    def aligned(self, number: int) -> jax.Array:
        """See ScoreTile: of an array by heads alone."""
        return self._spread(self._by_head(self.arrays[number].reshape(-1)))

    def distance(self) -> jax.Array:
        """See ScoreTile."""
        q, kv = self._positions()
        return abs((kv - q).astype(np.float32))

    def linear(self, step: Linear, unit: float) -> jax.Array:
        """See ScoreTile."""
        return self.aligned(step.reads[0]) * np.float32(unit) * self.distance()

    def lookup(self, step: Lookup, unit: float) -> jax.Array:
        """See ScoreTile."""
        table = self._by_head(self.arrays[step.reads[0]] * np.float32(unit))
        q, kv = self._positions()
        index = jnp.clip(step.index(q, kv), 0, table.shape[-1] - 1)[..., 0, :, 0, :]  # [..., queries, keys]
        values = table.at[:, :, index].get(mode="promise_in_bounds")  # [kv heads, group, ..., queries, keys]
        return jnp.moveaxis(values, (0, 1), (-4, -2))

    def places(self, shape: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
        """See ScoreTile; the batch row is the sequence's."""
        kv_heads, group = self.heads
        head = self._spread(jnp.arange(kv_heads * group, dtype=np.int32).reshape(kv_heads, group)) + self.head_start
        row = self.row.reshape(*self.row.shape, *[1] * 4)
        batch, head, q, kv = (jnp.broadcast_to(x, shape) for x in (row, head, *self._positions()))
        return batch, head, q, kv

    def diagonal(self, step: Diagonal, unit: float) -> jax.Array:
        """Not over pages: rows have no common distances."""
        raise AssertionError(step)

    def product(self, step: Product, unit: float) -> jax.Array:
        """Not over pages: it has an array by rows."""
        raise AssertionError(step)
