"""Which slots the tokens of a step on TPUs read and write, as indices of a kernel's blocks, and what each token does."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .over_rows import Rows

__all__ = ["FRESH", "KEEPS", "LAST", "LIVE", "OWN", "STARTS", "UNKNOWN", "WRITES", "Moves", "moves_of"]

FRESH, WRITES, KEEPS, UNKNOWN, LIVE, STARTS = 1, 2, 4, 8, 16, 32  # what a token does
OWN, LAST, FIRST = 0, 1, 2  # which heads' block: its own, or one that stays where it is


class Moves(NamedTuple):
    """int32 [rows * tokens] each: the slot that a token's row reads and which of its blocks, the same of what the token writes,
    and what it does."""

    read: jax.Array
    read_block: jax.Array
    write: jax.Array
    write_block: jax.Array
    does: jax.Array


def moves_of(rows: Rows, slots: int) -> Moves:
    write = rows.write[:, ::-1]  # column j is of the state without the last j tokens
    size = write.shape[1]
    live, known = rows.lengths > 0, (rows.read >= 0) & (rows.read < slots)
    place = jnp.arange(size, dtype=jnp.int32)[None] + (rows.lengths - np.int32(size))[:, None]
    reads, writes = live & ~rows.fresh & known, (place >= 0) & (write >= 0) & (write < slots)
    first = jnp.arange(len(write)) == 0
    # If no row writes, the first writes what it reads.
    keeps = first & ~jnp.any(writes)
    forced = first & (keeps | ~jnp.any(reads))
    read, read_block = _filled(jnp.where(reads, rows.read, 0)[:, None], (reads | forced)[:, None])
    keeping = keeps[:, None] & (jnp.arange(size) == 0)[None]
    write, write_block = _filled(jnp.where(keeping, read, write), writes | keeping)
    unknown = live & ~rows.fresh & ~known
    of_row = jnp.where(reads, 0, FRESH) + jnp.where(unknown, UNKNOWN, 0)
    does = of_row[:, None] + jnp.where(writes, WRITES, 0) + jnp.where(keeping, KEEPS, 0)
    does += jnp.where(place >= 0, LIVE, 0) + jnp.where(place == 0, STARTS, 0)
    of_tokens = (jnp.broadcast_to(x, write.shape) for x in (read, read_block, write, write_block, does))
    return Moves(*(x.astype(jnp.int32).reshape(-1) for x in of_tokens))


def _filled(slot: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the slot of each token [rows, tokens], its own or that of another; which of its blocks [rows, 1]). In a row all heads of a
    block go through the tokens before the next block does."""
    (count, size), has = own.shape, jnp.any(own, 1)

    def near(own: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        """Along the last axis (the last place that is own, -1 for none; the first one from there on, most for none)."""
        places = jnp.arange(own.shape[-1], dtype=jnp.int32)
        axis = own.ndim - 1
        last = lax.cummax(jnp.where(own, places, np.int32(-1)), axis)
        return last, lax.cummin(jnp.where(own, places, np.int32(most)), axis, reverse=True)

    last, following = near(own, size - 1)
    in_row = jnp.take_along_axis(slot, jnp.where(last >= 0, last, following), 1)
    before, after = near(has, count - 1)
    # The last slot of a row before, or the first of one after.
    other = jnp.where(before >= 0, in_row[before, -1], in_row[after, 0])
    block = jnp.where(has, OWN, jnp.where(before >= 0, LAST, FIRST))
    return jnp.where(has[:, None], in_row, other[:, None]), block[:, None]
