"""A score's steps on a sub-tile of splash's kernels: how their arrays lie in memory, and how a sub-tile reads them.

A bias that follows from the distance is the same along each diagonal. So a tile is put together of squares of 128 x 128, of which
only one for each diagonal of squares is made: 15 instead of 64 in a tile of 1024 x 1024.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....scores.steps import Diagonal, Linear, Lookup, Product, Steps
from ...kernels.local_mask import LocalMask
from ...kernels.precision import tile_product
from ...kernels.primitives import cut_along, shifted
from .grid import KernelGrid, padded
from .subtiles import SubTile
from .tile import Tile

__all__ = ["SIDE", "SUBLANES", "SubTileScores", "add_captures", "diagonal_room", "first_diagonal"]

SIDE, SUBLANES = 128, 8  # the side of a square is the lanes of a register


def add_captures(
    grid: KernelGrid, steps: Steps, captures: tuple[jax.Array, ...], mask: LocalMask, reverse_diagonals: bool
) -> None:
    """Add the arrays of a score's steps to a kernel's operands: one number a head as scalars, the others as blocks.

    reverse_diagonals: for tiles held as [keys, queries].
    """
    grid.capture_shapes = tuple(x.shape for x in captures)
    rows = {read: step.rows for step in steps.steps if isinstance(step, Diagonal) for read in step.reads}
    for number, (x, form) in enumerate(zip(captures, steps.forms, strict=True)):
        name = capture_name(number)
        if form == "aligned" and x.shape[2:] == (1, 1):
            grid.scalars[name] = x.reshape(-1)
        elif form == "aligned" and 1 not in x.shape[2:]:
            grid.add_dense(name, x)
        elif form == "aligned":
            grid.add_of_heads(name, x.reshape(*x.shape[:2], 1, -1), **{"kv" if x.shape[2] == 1 else "q": 3})
        elif form == "columns":
            array = x if x.shape[2] > 1 else jnp.broadcast_to(x, (*x.shape[:2], mask.q_len, x.shape[3]))
            grid.add_of_heads(name, array, q=2)
        elif form == "table":
            grid.add_of_heads(name, padded(x, {1: SIDE})[None, :, None])
        else:
            array = _local_diagonals(grid, x, rows[number], mask)
            if reverse_diagonals:
                array = jnp.pad(array[..., :-1][..., ::-1], [(0, 0)] * 2 + [(0, 1)])
            grid.add_of_heads(name, _in_sublanes(array))


def _in_sublanes(x: jax.Array) -> jax.Array:
    """[.., 8, n] of [.., n]: row r has what is 7 - r later. So the rows of a square differ by shifts of whole registers."""
    later = jnp.pad(x, [(0, 0)] * 2 + [(0, SUBLANES - 1)])
    return jnp.stack([later[..., n : n + x.shape[2]] for n in reversed(range(SUBLANES))], axis=2)


def capture_name(number: int) -> str:
    """The name of a step's array among a kernel's operands."""
    return f"capture{number}"


def diagonal_room(grid: KernelGrid, mask: LocalMask) -> tuple[int, int]:
    """(padded queries, how many numbers the kernel's array of diagonals has)."""
    q_padded, kv_padded = (
        -(-n // size) * size for n, size in ((mask.q_len, grid.block_q), (mask.kv_len, grid.block_kv))
    )
    return q_padded, q_padded + kv_padded


def first_diagonal(mask: LocalMask, rows: int, q_padded: int) -> Any:
    """The number in a Diagonal's array that is the kernel's first, if not negative. rows: the Diagonal's."""
    return shifted(mask.k_start - mask.q_start, rows - q_padded)


def _local_diagonals(grid: KernelGrid, x: jax.Array, rows: int, mask: LocalMask) -> jax.Array:
    """The numbers that this device needs of [.., rows + keys - 1]: row r and key c have number c - r + padded rows - 1."""
    q_padded, count = diagonal_room(grid, mask)
    # Padded rows and keys read zeros on both sides.
    x = jnp.pad(x, [(0, 0)] * 2 + [(q_padded, count)])
    return cut_along(x, shifted(first_diagonal(mask, rows, q_padded), q_padded), count, axis=2)


@dataclass(frozen=True)
class SubTileScores:
    """A ScoreTile: [queries, keys] or, if the tile is transposed, [keys, queries]."""

    tile: Tile
    subtile: SubTile

    # -- arrays ------------------------------------------------------------------------------------------------------

    def _row_in(self, ref: Any) -> int:
        """The place of the sub-tile's head in a block with heads."""
        return self.subtile.number if ref.shape[0] > 1 else 0

    def aligned(self, number: int) -> Any:
        """See ScoreTile."""
        tile, name = self.tile, capture_name(number)
        ref, (batch, heads, *tail) = tile.refs[name], self._shape(number)
        if tail == [1, 1]:
            head = tile.head(self.subtile.head) if heads > 1 else 0
            return ref[head if batch == 1 else tile.step.batch * heads + head]
        if 1 not in tail:
            return tile.dense(name, self.subtile)
        dim, places = ("kv", self.subtile.keys) if tail[0] == 1 else ("q", self.subtile.queries)
        return tile.turned(ref[self._row_in(ref), :, places], dim)

    def _shape(self, number: int) -> tuple[int, ...]:
        return self.tile.grid.capture_shapes[number]

    @property
    def _by_positions(self) -> bool:
        score = self.tile.static_args.score
        return score is not None and score.positions

    def places(self, shape: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
        """See ScoreTile."""
        batch, head = self.tile.row_and_head(self.subtile.head)
        q, kv = self.tile.positions(self.subtile)
        batch, head, q, kv = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in (batch, head, q, kv))
        return batch, head, q, kv

    # -- distances ---------------------------------------------------------------------------------------------------

    def distance(self) -> jax.Array:
        """See ScoreTile."""
        if self._by_positions:
            return self._of_positions(lambda q, kv: abs((kv - q).astype(jnp.float32)))
        return self._in_squares("distance", None, self._distances)

    def linear(self, step: Linear, unit: float) -> jax.Array:
        """See ScoreTile."""
        if self._by_positions or self._shape(step.reads[0])[2:] != (1, 1):
            return self.aligned(step.reads[0]) * unit * self.distance()
        slope = self.aligned(step.reads[0]) * unit
        return self._in_squares("linear", step, lambda offset: self._distances(offset) * slope)

    def diagonal(self, step: Diagonal, unit: float) -> jax.Array:
        """See ScoreTile."""
        return self._in_squares("diagonal", step, lambda offset: self._diagonals(step, offset, unit))

    def _distances(self, offset: int) -> jax.Array:
        """The square whose first key is `offset` keys after its first query's place in the tile."""
        rows, lanes = (lax.broadcasted_iota(jnp.int32, (SIDE, SIDE), axis) for axis in (0, 1))
        ahead = rows - lanes if self.tile.transposed else lanes - rows
        return abs((ahead + (self.tile.keys_ahead() + offset)).astype(jnp.float32))

    def _diagonals(self, step: Diagonal, offset: int, unit: float) -> jax.Array:
        tile, ref = self.tile, self.tile.refs[capture_name(step.reads[0])]
        count = ref.shape[-1]
        # Of 256 numbers in each of 8 rows, the first 8 rows of the square take those from 120 on, the next those from 112 on.
        first = tile.local_keys_ahead() + (offset + tile.padded_queries - SIDE)
        if tile.transposed:
            first = count - 2 * SIDE - first
        window = ref[self._row_in(ref), :, pl.ds(pl.multiple_of(first, SIDE), 2 * SIDE)] * unit
        starts = range(SIDE - SUBLANES, -1, -SUBLANES)
        return jnp.concatenate([(pltpu.roll(window, -n % (2 * SIDE), 1) if n else window)[:, :SIDE] for n in starts])

    def _in_squares(self, what: str, step: Any, make: Callable[[int], jax.Array]) -> jax.Array:
        """The sub-tile of squares that are made once for each diagonal, and for each head that differs."""
        cache, queries, keys = self.tile.squares, self.subtile.queries, self.subtile.keys
        by_head = step is not None and self._shape(step.reads[0])[1] > 1
        name = what, step, self.subtile.number if by_head else 0

        def square(key: int, query: int) -> jax.Array:
            at = (*name, key - query)
            if at not in cache:
                cache[at] = make(key - query)
            return cache[at]

        of_keys, of_queries = range(keys.start, keys.stop, SIDE), range(queries.start, queries.stop, SIDE)
        if self.tile.transposed:
            return _joined([[square(key, query) for query in of_queries] for key in of_keys])
        return _joined([[square(key, query) for key in of_keys] for query in of_queries])

    # -- tables ------------------------------------------------------------------------------------------------------

    def _of_positions(self, function: Callable[[Any, Any], Any]) -> jax.Array:
        shape = self.subtile.shape[::-1] if self.tile.transposed else self.subtile.shape
        q, kv = (jnp.broadcast_to(x, shape) for x in self.tile.positions(self.subtile))
        return function(q, kv)

    def lookup(self, step: Lookup, unit: float) -> jax.Array:
        """See ScoreTile."""
        ref = self.tile.refs[capture_name(step.reads[0])]
        table = ref[self._row_in(ref)] * unit
        entries = self._shape(step.reads[0])[1]
        at = "index", step, self.subtile.queries.start, self.subtile.keys.start, self.subtile.shape
        if at not in self.tile.squares:
            self.tile.squares[at] = self._of_positions(lambda q, kv: jnp.clip(step.index(q, kv), 0, entries - 1))
        index = self.tile.squares[at]
        return _joined(
            [[_chosen(table, lax.slice_in_dim(index, n, n + SIDE, axis=1)) for n in range(0, index.shape[1], SIDE)]]
        )

    def product(self, step: Product, unit: float) -> jax.Array:
        """See ScoreTile."""
        ref = self.tile.refs[capture_name(step.reads[0])]
        x = ref[self._row_in(ref), self.subtile.queries] * unit
        chosen = self.chosen(step, x.shape[1])
        return tile_product(chosen, x, 0, 1) if self.tile.transposed else tile_product(x, chosen, 1, 0)

    def chosen(self, step: Product, count: int) -> jax.Array:
        """Which of a Product's numbers each key has: ones and zeros, [count, keys]."""
        row = step.index(self.tile.key_row(self.subtile))
        numbers = lax.broadcasted_iota(jnp.int32, (count, row.shape[1]), 0)
        return (numbers == jnp.broadcast_to(row, numbers.shape)).astype(jnp.float32)


def _chosen(table: jax.Array, index: jax.Array) -> jax.Array:
    """Entries of a table [1, n x 128] at indices [rows, 128]. Indices permute the lanes of a register: 128 entries at a time."""
    result = None
    lane = index & (SIDE - 1)
    for first in range(0, table.shape[1], SIDE):
        part = jnp.broadcast_to(table[:, first : first + SIDE], index.shape)
        part = jnp.take_along_axis(part, lane, axis=1, mode="promise_in_bounds")
        result = part if result is None else jnp.where(index >= first, part, result)
    assert result is not None
    return result


def _joined(rows: list[list[jax.Array]]) -> jax.Array:
    """Arrays beside and below one another."""
    join: Callable[..., Any] = lambda parts, axis: parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)  # noqa: E731
    return functools.reduce(lambda a, b: jnp.concatenate([a, b], 0), [join(row, 1) for row in rows])
