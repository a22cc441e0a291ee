"""The keys that a block of queries meets, tile by tile: gathered for each query, or shared by the block and masked.

A tile takes its keys out of any prepared array and adds to such an array what belongs to them. A row is one of batch and kv heads
together. What no query of the block meets is taken as zeros, so that it has no effect, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ...kernels.local_mask import LocalMask
from ...kernels.primitives import cut_along, loop, numbers, split_index
from ...kernels.varying import vary, varying
from .row_blocks import block_of, long_enough, put_block
from .visibility import VisibleBlocks

__all__ = [
    "GatheredKeys",
    "KeyTile",
    "KeyTiles",
    "SelectedTiles",
    "VisibleTiles",
    "fold_blocks",
    "heads_first",
    "heads_last",
]

Step = Callable[["KeyTile", Any], Any]


class KeyTile(Protocol):
    """Some keys. rows: 'q' if each query has its own, else ''; visible: bool [block_q, keys], of no query beyond the last."""

    @property
    def rows(self) -> str: ...

    @property
    def visible(self) -> Bool[Array, "block_q keys"]: ...

    def take(self, x: Array, row: Any) -> Array:
        """The keys' part of a row of a prepared x: [block_q, keys, ...] or [keys, ...]."""
        ...

    def add(self, x: Array, part: Float[Array, ...], row: Any) -> Array:
        """x with that part added."""
        ...


class KeyTiles(Protocol):
    """The tiles of each block of queries."""

    @property
    def block_q(self) -> int: ...

    def prepared(self, x: Array) -> Array:
        """x [batch, kv_len, heads, ...] as tiles are taken from it."""
        ...

    def restored(self, x: Array, heads: int) -> Array:
        """The inverse."""
        ...

    def fold(self, row: Any, q_block: Any, step: Step, carry: Any) -> Any:
        """step(tile, carry) over the tiles of a block of queries."""
        ...


# -- keys of each query ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatheredTile:
    """A KeyTile of selected positions."""

    visible: Bool[Array, "block_q keys"]
    positions: Int[Array, "block_q keys"]
    rows: str = "q"

    def take(self, x: Array, row: Any) -> Array:
        """See KeyTile."""
        part = jnp.take(x.reshape(-1, *x.shape[3:]), self._places(x, row), axis=0, mode="clip")
        return _zero_where(~self.visible, part)

    def add(self, x: Array, part: Float[Array, ...], row: Any) -> Array:
        """See KeyTile."""
        flat = x.reshape(-1, *x.shape[3:])
        place = jnp.where(self.visible, self._places(x, row), flat.shape[0])
        return flat.at[place].add(part, mode="drop").reshape(x.shape)

    def _places(self, x: Array, row: Any) -> Int[Array, "block_q keys"]:
        batch, head = split_index(row, x.shape[2], x.shape[0])
        return (self.positions + batch * x.shape[1]) * x.shape[2] + head


@dataclass(frozen=True)
class GatheredKeys:
    """KeyTiles of one tile: the selected keys of each query, copied. positions: int32 [batch, q_len, k], distinct in a row.

    Arrays are read where they lie, [batch, kv_len, heads, ...].
    """

    positions: Int[Array, "batch q_len k"]
    kv_len: int
    block_q: int

    def prepared(self, x: Array) -> Array:
        """See KeyTiles."""
        return x

    def restored(self, x: Array, heads: int) -> Array:
        """See KeyTiles."""
        return x

    def fold(self, row: Any, q_block: Any, step: Step, carry: Any) -> Any:
        """See KeyTiles."""
        positions, visible = _selected_block(self.positions, self.kv_len, row, q_block, self.block_q)
        return step(GatheredTile(visible, jnp.where(visible, positions, 0)), carry)


# -- keys shared by a block of queries ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedTile:
    """A KeyTile of a block of keys."""

    visible: Bool[Array, "block_q keys"]
    number: Any
    rows: str = ""

    def take(self, x: Array, row: Any) -> Array:
        """See KeyTile."""
        return _zero_where(~self.visible.any(0), block_of(x, row, self.number, self.visible.shape[1]))

    def add(self, x: Array, part: Float[Array, ...], row: Any) -> Array:
        """See KeyTile."""
        before = block_of(x, row, self.number, self.visible.shape[1])
        return put_block(x, before + part, row, self.number)


@dataclass(frozen=True)
class SelectedTiles:
    """KeyTiles of the blocks of keys from which some query of the block selected."""

    positions: Int[Array, "batch q_len k"]
    kv_len: int
    block_q: int
    block_kv: int

    def prepared(self, x: Array) -> Array:
        """See KeyTiles."""
        return long_enough(heads_first(x), self.block_kv)

    def restored(self, x: Array, heads: int) -> Array:
        """See KeyTiles."""
        return heads_last(x[:, : self.kv_len], heads)

    def fold(self, row: Any, q_block: Any, step: Step, carry: Any) -> Any:
        """See KeyTiles."""
        positions, visible = _selected_block(self.positions, self.kv_len, row, q_block, self.block_q)
        blocks = -(-self.kv_len // self.block_kv)
        place = jnp.where(visible, positions, blocks * self.block_kv)
        nothing = vary(jnp.zeros((self.block_q, blocks * self.block_kv), bool), varying(positions))
        chosen = nothing.at[numbers((self.block_q, 1), 0), place].set(True, mode="drop")
        chosen = chosen.reshape(self.block_q, blocks, self.block_kv).swapaxes(0, 1)
        live = chosen.any((1, 2))
        order = jnp.argsort(~live, stable=True).astype(jnp.int32)

        def visit(n: Any, carry: Any) -> Any:
            block = lax.squeeze(cut_along(order, n, 1), (0,))
            return step(SharedTile(cut_along(chosen, block, 1)[0], block), carry)

        return loop(0, live.sum(dtype=jnp.int32), visit, carry)


class VisibleTiles:
    """KeyTiles of the blocks of keys that a mask shows to some query of the block."""

    def __init__(self, mask: LocalMask, block_q: int, block_kv: int) -> None:
        self.block_q, self.block_kv = block_q, block_kv
        self.kv_len = mask.kv_len
        self._q_len, self._blocks = mask.q_len, VisibleBlocks(mask, block_q, block_kv)

    def prepared(self, x: Array) -> Array:
        """See KeyTiles."""
        return long_enough(heads_first(x), self.block_kv)

    def restored(self, x: Array, heads: int) -> Array:
        """See KeyTiles."""
        return heads_last(x[:, : self.kv_len], heads)

    def fold(self, row: Any, q_block: Any, step: Step, carry: Any) -> Any:
        """See KeyTiles."""
        inside = _inside(q_block, self.block_q, self._q_len)

        def visit(block: Any, carry: Any) -> Any:
            return step(SharedTile(self._blocks.seen(row, q_block, block) & inside, block), carry)

        return self._blocks.fold(row, q_block, visit, carry)


def heads_first(x: Array) -> Array:
    """[batch, length, heads, ...] as [batch * heads, length, ...]."""
    x = x.swapaxes(1, 2)
    return x.reshape(-1, *x.shape[2:])


def heads_last(x: Array, heads: int) -> Array:
    """The inverse."""
    return x.reshape(-1, heads, *x.shape[1:]).swapaxes(1, 2)


def fold_blocks(batch: int, q_len: int, block_q: int, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """step(row of the batch, block of queries, carry) over all blocks of queries."""
    blocks = -(-q_len // block_q)
    return loop(0, batch * blocks, lambda n, c: step(*split_index(n, blocks, batch), c), carry)


def _selected_block(positions: Array, kv_len: int, row: Any, q_block: Any, block_q: int) -> tuple[Array, Array]:
    """(positions of a block of queries, which of them are keys of a query)."""
    part = block_of(long_enough(positions, block_q), row, q_block, block_q)
    return part, (part >= 0) & (part < np.int32(kv_len)) & _inside(q_block, block_q, positions.shape[1])


def _inside(q_block: Any, block_q: int, q_len: int) -> Array:
    """Which rows of a block of queries exist, [block_q, 1]."""
    return numbers((block_q, 1), 0, q_block * block_q) < np.int32(q_len)


def _zero_where(hidden: Array, x: Array) -> Array:
    hidden = jnp.broadcast_to(hidden.reshape(*hidden.shape, *(1,) * (x.ndim - hidden.ndim)), x.shape)
    return jnp.where(hidden, jnp.zeros_like(x), x)
