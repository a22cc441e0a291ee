"""The grid of a pass: the list of live tiles, in the order in which the kernel visits them.

One int32 word says where a tile lies and what is to be done there, so that the list costs 4 bytes a tile of scalar memory
and an index map is two shifts. A list that the host knows is exact. One that depends on traced values is sorted on the
device, and the grid's length is then the number of live tiles found there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....masks import And, Mask
from ...local_mask import LocalMask

__all__ = [
    "FIRST", "LAST", "LIVE", "MOST_KV_BLOCKS", "MOST_Q_BLOCKS", "MOST_WORDS", "PARTIAL", "Known", "TileSchedule",
    "fewest_steps", "kv_block_of", "live_tiles", "most_steps", "q_block_of", "tile_schedule",
]  # fmt: skip

# What a word's low bits say: the first and the last visit of a block of the slow axis; a tile with something visible; one
# that needs its mask.
FIRST, LAST, LIVE, PARTIAL = 1, 2, 4, 8
_KV_BITS = 12
MOST_KV_BLOCKS, MOST_Q_BLOCKS = 1 << _KV_BITS, 1 << (31 - 4 - _KV_BITS)
MOST_WORDS = 7 << 15  # seven eighths of a MiB: of all generations' scalar memory, something is left for the compiler


class Known(NamedTuple):
    """A device's mask, and what the host knows of where its rows and keys lie: starts and offset are None where traced.

    An offset that no part of the mask looks at is 0.
    """

    mask: Mask
    q_len: int
    kv_len: int
    q_start: int | None
    k_start: int | None
    query_offset: int | None

    @classmethod
    def of(cls, mask: LocalMask) -> Known:
        """Of the mask that a kernel is given."""
        offset = 0 if mask.query_offset is None else mask.query_offset
        static_part = (x if isinstance(x, int) else None for x in (mask.q_start, mask.k_start, offset))
        return cls(mask.mask, mask.q_len, mask.kv_len, *static_part)

    def outer(self) -> Mask | None:
        """A mask with row intervals that lets all be seen that is seen; None where a traced place leaves nothing known."""
        if self.q_start is None or self.k_start is None or self.query_offset is None:
            return None
        # A mask function is known weight by weight alone.
        parts = self.mask.split_static()[0].conjuncts()
        return And([part for part in parts if "mask_function" not in part.features()])


class TileSchedule(NamedTuple):
    """`words` int32 [rows * tables * length]: a list for each batch row, or one for all, and for each part of the heads.

    `length` is that of a list, `covered` the part of it that the grid covers. `some_partial`, `some_full`: False where the
    host knows that no tile is such.
    """

    words: np.ndarray | jax.Array
    rows: int
    length: int
    covered: int | jax.Array
    some_partial: bool
    some_full: bool
    tables: int = 1


def q_block_of(word: Any) -> Any:
    """The query block of a visit."""
    return word >> (4 + _KV_BITS)


def kv_block_of(word: Any) -> Any:
    """The kv block of a visit."""
    return (word >> 4) & (MOST_KV_BLOCKS - 1)


def tile_schedule(
    mask: LocalMask, block_q: int, block_kv: int, slow: str, kv_blocks: slice = slice(None), tables: int = 1
) -> TileSchedule:
    """List the tiles that have something visible, by query block (`slow` is 'q') or by kv block ('kv').

    A block of the slow axis with nothing visible is visited once all the same: its output has to be written. A last kv
    block that is padded counts as partial. kv_blocks: those that the list is of. tables: parts of the heads with lists of
    their own, where heads see blocks of their own.
    """
    kinds = mask.kinds_of_heads(block_q, block_kv, tables)
    tables = kinds.shape[1]
    kinds = kinds.reshape(-1, *kinds.shape[2:])
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    if mask.kv_len % block_kv:
        last_block = np.arange(kinds.shape[-1]) == kinds.shape[-1] - 1
        kinds = xp.where(last_block, xp.minimum(kinds, 1), kinds)
    q_block, kv_block = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in kinds.shape[1:]), indexing="ij")
    kinds, q_block, kv_block = kinds[..., kv_blocks], q_block[:, kv_blocks], kv_block[:, kv_blocks]
    if slow == "kv":
        kinds, q_block, kv_block = kinds.swapaxes(1, 2), q_block.T, kv_block.T
    live = kinds > 0
    visited = live | (~live.any(-1, keepdims=True) & (np.arange(kinds.shape[-1]) == 0))
    rank = visited.cumsum(-1)
    first, last = visited & (rank == 1), visited & (rank == rank[..., -1:])
    flags = first * FIRST + last * LAST + live * LIVE + (kinds == 1) * PARTIAL
    words = (((q_block << _KV_BITS) | kv_block) << 4) + flags
    if isinstance(kinds, np.ndarray):
        lists = [own[here].astype(np.int32) for own, here in zip(words, visited, strict=True)]
        length = max(map(len, lists))
        listed = np.concatenate([np.concatenate([x, np.repeat(_ended(x[-1:]), length - len(x))]) for x in lists])
        some = bool((kinds == 1).any()), bool((kinds == 2).any())
        return TileSchedule(listed, 1, length, length, *some, tables)
    length = most_steps(live_tiles(Known.of(mask), block_q, block_kv), slow, kv_blocks)
    return _sorted_on_device(words.astype(jnp.int32), visited, length, tables)


def _ended(word: Any) -> Any:
    """A visit to the same place at which nothing is done: blocks that stay the same are not fetched again."""
    return word & ~(FIRST | LAST | LIVE | PARTIAL)


def _sorted_on_device(words: jax.Array, visited: jax.Array, length: int, tables: int) -> TileSchedule:
    rows = len(words)
    words, visited = words.reshape(rows, -1), visited.reshape(rows, -1)
    place = jnp.where(visited, visited.cumsum(-1) - 1, length)
    row = np.arange(rows)[:, None]
    listed = jnp.zeros((rows, length), jnp.int32).at[row, place].set(words, mode="drop")
    counts = visited.sum(-1, dtype=jnp.int32)
    end = _ended(jnp.take_along_axis(listed, counts[:, None] - 1, axis=1))  # a list repeats it beyond its end
    listed = jnp.where(np.arange(length) < counts[:, None], listed, end)
    return TileSchedule(listed.reshape(-1), rows // tables, length, counts.max(), True, True, tables)


def live_tiles(known: Known, block_q: int, block_kv: int) -> np.ndarray:
    """The tiles that may have something visible, bool [q blocks, kv blocks]."""
    outer = known.outer()
    if outer is None:
        return np.broadcast_to(True, (-(-known.q_len // block_q), -(-known.kv_len // block_kv)))
    static_part = {"q_start": known.q_start, "k_start": known.k_start, "query_offset": known.query_offset}
    return outer.live_blocks(block_q, block_kv, q_len=known.q_len, kv_len=known.kv_len, **static_part) > 0  # type: ignore[arg-type]


def most_steps(live: np.ndarray, slow: str, kv_blocks: slice = slice(None)) -> int:
    """The most visits of a list; exactly as many where all of the mask is static and has row intervals."""
    # Of a block of the slow axis as many as are live, and one where none is.
    return int(np.maximum(live[:, kv_blocks].sum(axis=1 if slow == "q" else 0), 1).sum())


def fewest_steps(known: Known, block_q: int, block_kv: int) -> int:
    """Some of the live tiles: those that the first row of each query block sees. Many rows are not looked at."""
    outer = known.outer()
    if outer is None:
        return live_tiles(known, block_q, block_kv).size
    q_start, k_start = known.q_start or 0, known.k_start or 0
    rows = np.arange(0, known.q_len, block_q, dtype=np.int64) + q_start
    intervals = outer.row_intervals(rows, k_start + known.kv_len, query_offset=known.query_offset or 0)
    if intervals is None:  # of blocks that each head has for itself
        return int(np.maximum(live_tiles(known, block_q, block_kv).sum(axis=1), 1).sum())
    lo, hi = (np.maximum(x - k_start, 0) for x in intervals)
    found, done = 0, np.zeros(len(rows), np.int64)
    for first, end in zip(lo // block_kv, np.where(lo < hi, -(-hi // block_kv), 0), strict=True):
        found += int(np.maximum(end - np.maximum(first, done), 0).sum())
        done = np.maximum(done, end)
    return found
