"""What blocks of threads work on: tiles of a sequence's rows, each against a part of the keys that they see.

A tile's keys are divided so that a batch has about as many parts as the device takes at once, whatever the lengths: all parts
but the last of a tile have equally many tiles of keys. How many is computed from the lengths, so it is the same for all rows of
a step, and the number of parts is bounded by the number of tiles and the parts asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..paged_step import Batch
from .page_rows import RowKeys, RowTiles

__all__ = ["FIELDS", "OwnRows", "Units", "chunk_tiles", "own_rows", "sequence_tiles", "units_of"]

FIELDS = (
    "sequence", "tile", "begin", "full", "after_full", "end", "first", "first_key", "end_key", "first_draft", "own", "token",
)  # fmt: skip
"""Of a unit, int32: its sequence, -1 for none; its tile of rows; its tiles of keys, of which those from `full` to
before `after_full` are seen by every row; whether it is the first part of its rows; the keys that any of these rows sees, and
from which of them on bits of rows decide; the place of the key that it writes to its page, -1 for none, and that key's token in
the step. Keys are counted over the pages of the table."""

_LEAST = 4  # tiles of a part: a block's beginning and end take the time of some


class Units(NamedTuple):
    """table: int32 [units, fields]. begin, number: int32 [tiles], a tile's first unit and how many it has."""

    table: jax.Array
    begin: jax.Array
    number: jax.Array
    most: int  # of a tile


class OwnRows(NamedTuple):
    """Keys that tiles of one token write, int32 [tiles] each: their places, -1 for none, and their tokens in the step."""

    place: jax.Array
    token: jax.Array


def own_rows(tiles: RowTiles, batch: Batch, table: jax.Array, page: int, pages: int) -> OwnRows:
    """Those of sequences with one token, whose page is there."""
    of = lambda x: x.at[tiles.sequence].get(mode="promise_in_bounds")  # noqa: E731
    place, number = of(batch.kv_lens) - 1, (of(batch.kv_lens) - 1) // np.int32(page)
    at = jnp.clip(number, 0, np.int32(table.shape[1] - 1))
    ids = table.at[tiles.sequence, at].get(mode="promise_in_bounds")
    there = (of(batch.q_lens) == 1) & (tiles.tokens > 0) & (place >= 0) & (number < table.shape[1])
    there &= (ids >= 0) & (ids < pages)
    return OwnRows(jnp.where(there, place, -1), of(batch.starts))


def sequence_tiles(batch: Batch, selected: jax.Array, most: int) -> RowTiles:
    """A tile for each sequence, of its first `most` tokens."""
    count = jnp.where(selected, jnp.minimum(batch.q_lens, np.int32(most)), 0)
    return RowTiles(jnp.arange(len(count), dtype=np.int32), jnp.zeros_like(count), count)


def chunk_tiles(batch: Batch, selected: jax.Array, tokens: int, size: int) -> tuple[RowTiles, jax.Array]:
    """(tiles of `size` tokens of each selected sequence, a sequence's first tile). tokens: of the query array."""
    of_sequence = jnp.where(selected, _ceil(batch.q_lens, size), 0)
    ends = jnp.cumsum(of_sequence, dtype=np.int32)
    number = jnp.arange(-(-tokens // size) + len(of_sequence), dtype=np.int32)
    sequence, within = _placed(ends, of_sequence, number)
    token = within * np.int32(size)
    left = batch.q_lens.at[sequence].get(mode="promise_in_bounds") - token
    count = jnp.where(number < ends[-1], jnp.clip(left, 0, np.int32(size)), 0)
    return RowTiles(sequence, token, count), ends - of_sequence


def units_of(
    tiles: RowTiles,
    keys: RowKeys,
    table: jax.Array,
    *,
    page: int,
    pages: int,
    block_kv: int,
    parts: int,
    written: OwnRows | None = None,
) -> Units:
    """The units of work. keys: of the tiles' rows. parts: into how many all keys are divided besides one for each tile; 0: not at
    all. written: the keys that the tiles write, each by the last part of its rows; its tile of keys isn't a whole one."""
    of = lambda x: x.at[tiles.sequence].get(mode="promise_in_bounds")  # noqa: E731
    width = table.shape[1] * page
    used = tiles.tokens > 0
    some = used & (keys.end > keys.first)
    first_key, end_key = jnp.where(some, keys.first, 0), jnp.where(some, keys.end, 0)
    begin, end = first_key // np.int32(block_kv), _ceil(end_key, block_kv)
    # A page that isn't there gives no keys: tiles from it on aren't known to be whole.
    number = jnp.arange(table.shape[1], dtype=np.int32)[None]
    missing = of((table < 0) | (table >= pages)) & (number >= (first_key // np.int32(page))[:, None])
    gap = jnp.where(missing, number, np.int32(table.shape[1])).min(1)
    full = jnp.clip(_ceil(keys.all_from, block_kv), begin, end)
    after_full = jnp.minimum(keys.all_before, gap * np.int32(page)) // np.int32(block_kv)
    own = token = jnp.full_like(begin, -1)
    if written is not None:
        own, token = written.place, written.token
        after_full = jnp.where(own >= 0, jnp.minimum(after_full, own // np.int32(block_kv)), after_full)
    after_full = jnp.clip(after_full, full, end)

    count, turn, tile = used.astype(np.int32), jnp.zeros_like(begin), jnp.arange(len(begin), dtype=np.int32)
    if parts:
        total = jnp.sum(end - begin, dtype=np.int32)
        size = jnp.maximum(_ceil(total, parts), np.int32(_LEAST))
        count = jnp.where(used, jnp.maximum((end - begin + size - 1) // size, 1), 0)
    ends = jnp.cumsum(count, dtype=np.int32)
    if parts:
        number = jnp.arange(len(begin) + parts, dtype=np.int32)
        tile, turn = _placed(ends, count, number)
        used = number < ends[-1]
        pick = lambda x: x.at[tile].get(mode="promise_in_bounds")  # noqa: E731
        low = pick(begin) + turn * size
        high = jnp.minimum(low + size, pick(end))
        full, after_full = (jnp.clip(pick(x), low, high) for x in (full, after_full))
        begin, end, first_key, end_key = low, high, pick(first_key), pick(end_key)
        own, token = jnp.where(turn == pick(count) - 1, pick(own), -1), pick(token)
    sequence, first_draft = (x.at[tile].get(mode="promise_in_bounds") for x in (tiles.sequence, keys.first_draft))
    fields = (
        jnp.where(used, sequence, -1),
        tile,
        begin,
        full,
        after_full,
        end,
        turn == 0,
        first_key,
        end_key,
        first_draft,
        own,
        token,
    )
    most = min(parts + 1, -(-width // (block_kv * _LEAST))) if parts else 1
    return Units(jnp.stack([x.astype(np.int32) for x in fields], axis=1), ends - count, count, max(1, most))


def _ceil(x: jax.Array, size: int | jax.Array) -> jax.Array:
    """x / size, rounded up; x from 0 on."""
    whole = np.int32(size) if isinstance(size, int) else size
    return (x + (whole - 1)) // whole


def _placed(ends: jax.Array, counts: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(which run each number falls into, its place there) of runs that end there and have so many; the last for those beyond."""
    run = jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=np.int32)
    run = jnp.minimum(run, len(ends) - 1)
    begin = ends - counts
    return run, number - begin.at[run].get(mode="promise_in_bounds")
