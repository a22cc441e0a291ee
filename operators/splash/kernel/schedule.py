"""The grid of a pass: the list of live tiles, in the order in which the kernel visits them.

One int32 word encodes a tile's place and what to do there, so the list takes 4 bytes of scalar memory per tile
and an index map is two shifts. A list that the host knows is exact. One that depends on traced values is sorted on the
device, and the grid's length is then the number of live tiles found there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....devices import SCALAR_BYTES
from ....masks import And, Full, Mask
from ...kernels.local_mask import LocalMask
from .bodies import MASKED, WHOLE, Body, bodies_of, cells

__all__ = [
    "BODY", "FIRST", "LAST", "MOST_KV_BLOCKS", "MOST_Q_BLOCKS", "MOST_WORDS", "Known", "TileSchedule", "bodies_of_part",
    "body_of", "fewest_steps", "kv_block_of", "live_tiles", "most_steps", "q_block_of", "run_time_bodies", "tile_bodies",
    "tile_schedule",
]  # fmt: skip

# A word's low bits: the first and the last visit of a block of the slow axis; the number of the tile's
# body, 0 if nothing is visible.
FIRST, LAST, BODY = 1, 2, 12
_KV_BITS = 12
MOST_KV_BLOCKS, MOST_Q_BLOCKS = 1 << _KV_BITS, 1 << (31 - 4 - _KV_BITS)
_MOST_UNITS = 1 << 22  # the most units to check; with more, tiles are treated whole
MOST_WORDS = SCALAR_BYTES // 4 * 7 // 8  # leaves some scalar memory for the compiler


class Known(NamedTuple):
    """A device's mask, and the host's knowledge of the rows' and keys' places: starts and offset are None if traced.

    An offset that no part of the mask depends on is 0.
    """

    mask: Mask
    q_len: int
    kv_len: int
    q_start: int | None
    k_start: int | None
    query_offset: int | None

    @classmethod
    def of(cls, mask: LocalMask) -> Known:
        """The knowledge of a kernel's mask."""
        offset = 0 if mask.query_offset is None else mask.query_offset
        static_part = (x if isinstance(x, int) else None for x in (mask.q_start, mask.k_start, offset))
        return cls(mask.mask, mask.q_len, mask.kv_len, *static_part)

    def outer(self) -> Mask | None:
        """A mask with row intervals that covers everything visible; None if a traced place leaves nothing known."""
        if self.q_start is None or self.k_start is None or self.query_offset is None:
            return None
        # A mask function is only known weight by weight.
        parts = self.mask.split_static()[0].conjuncts()
        return And([part for part in parts if "mask_function" not in part.features()])


class TileSchedule(NamedTuple):
    """`words` int32 [rows * tables * length]: a list for each batch row, or one for all, and for each group of heads.

    `length` is a list's length, `covered` the part of it that the grid covers. `bodies`: those used by visits; the first has
    number 1. `distances`: for each of them, the first row of its tiles less their first key, in the whole problem; None if that
    differs between them, or isn't known on the host.
    """

    words: np.ndarray | jax.Array
    rows: int
    length: int
    covered: int | jax.Array
    bodies: tuple[Body, ...]
    distances: tuple[int | None, ...]
    tables: int = 1

    @property
    def tiles(self) -> float:
        """The most tiles computed for one list: parts of tiles that are left out don't count."""
        if not isinstance(self.words, np.ndarray):
            return self.length
        counts = np.bincount(body_of(self.words), minlength=len(self.bodies) + 1)[1:]
        return sum(count * body.computed for count, body in zip(counts, self.bodies, strict=True)) / self.tables


def q_block_of(word: Any) -> Any:
    """The query block of a visit."""
    return word >> (4 + _KV_BITS)


def kv_block_of(word: Any) -> Any:
    """The kv block of a visit."""
    return (word >> 4) & (MOST_KV_BLOCKS - 1)


def body_of(word: Any) -> Any:
    """The number of a visit's body; 0 for none."""
    return (word & BODY) >> 2


def tile_schedule(
    mask: LocalMask,
    block_q: int,
    block_kv: int,
    slow: str,
    kv_blocks: slice = slice(None),
    tables: int = 1,
    unit: tuple[int, int] | None = None,
) -> TileSchedule:
    """List the tiles with visible keys, by query block (`slow` is 'q') or by kv block ('kv').

    A block of the slow axis without any is still visited once, because its output must be written. Padded
    keys aren't visible. kv_blocks: those that the list covers. tables: groups of heads with their own lists, if
    heads have different blocks. unit: the queries and keys of a unit, which bodies consist of; None: one unit for the whole
    tile.
    """
    bodies, numbers = tile_bodies(mask, (block_q, block_kv), unit or (block_q, block_kv), tables)
    tables = numbers.shape[1]
    bodies, numbers = bodies_of_part(bodies, numbers.reshape(-1, *numbers.shape[2:])[..., kv_blocks])
    shape = -(-mask.q_len // block_q), -(-mask.kv_len // block_kv)
    q_block, kv_block = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in shape), indexing="ij")
    q_block, kv_block = q_block[None, :, kv_blocks], kv_block[None, :, kv_blocks]
    if slow == "kv":
        numbers, q_block, kv_block = numbers.swapaxes(1, 2), q_block.swapaxes(1, 2), kv_block.swapaxes(1, 2)
    visible = numbers > 0
    visited = visible | (~visible.any(-1, keepdims=True) & (np.arange(numbers.shape[-1]) == 0)[None, None])
    rank = visited.cumsum(-1)
    first, last = visited & (rank == 1), visited & (rank == rank[..., -1:])
    ends = first.astype(np.int32) * FIRST + last.astype(np.int32) * LAST
    words = (((q_block << _KV_BITS) | kv_block) << 4) + ends + numbers.astype(np.int32) * (BODY & -BODY)
    if isinstance(numbers, np.ndarray):
        lists = [of_row[here].astype(np.int32) for of_row, here in zip(words, visited, strict=True)]
        length = max(map(len, lists))
        listed = np.concatenate([np.concatenate([x, np.repeat(_ended(x[-1:]), length - len(x))]) for x in lists])
        distances = _distances(mask, numbers, q_block * block_q - kv_block * block_kv, len(bodies))
        return TileSchedule(listed, 1, length, length, bodies, distances, tables)
    length = most_steps(live_tiles(Known.of(mask), block_q, block_kv), slow, kv_blocks)
    return _sorted_on_device(words.astype(jnp.int32), visited, length, tables, bodies)


def _distances(mask: LocalMask, numbers: np.ndarray, tile_distances: np.ndarray, bodies: int) -> tuple[int | None, ...]:
    """TileSchedule's, for the number of each tile's body, and each tile's first local row less its first local key."""
    if not isinstance(mask.q_start, int) or not isinstance(mask.k_start, int):
        return (None,) * bodies
    values = [
        np.unique(np.broadcast_to(tile_distances, numbers.shape)[numbers == number]) for number in range(1, bodies + 1)
    ]
    return tuple(
        int(distances[0]) + mask.q_start - mask.k_start if len(distances) == 1 else None for distances in values
    )


def tile_bodies(
    mask: LocalMask, block: tuple[int, int], unit: tuple[int, int], tables: int = 1
) -> tuple[tuple[Body, ...], np.ndarray | jax.Array]:
    """(bodies, each tile's number int8 [rows, tables | 1, q blocks, kv blocks]) for blocks of queries and keys, and units.

    If there are too many units to check, a tile is one unit.
    """
    count = -(-mask.q_len // block[0]), -(-mask.kv_len // block[1])
    of_block = block[0] // unit[0], block[1] // unit[1]
    if math.prod(count) * math.prod(of_block) * tables > _MOST_UNITS:
        unit, of_block = block, (1, 1)
    units = cells(_units(mask, *unit, tables), count, of_block)
    return bodies_of(units) if isinstance(units, np.ndarray) else _bodies_at_run_time(mask, units, unit, count)


def bodies_of_part(
    bodies: tuple[Body, ...], numbers: np.ndarray | jax.Array
) -> tuple[tuple[Body, ...], np.ndarray | jax.Array]:
    """(the bodies that some of the tiles use, their numbers there), so that a kernel for these tiles has no others."""
    if not isinstance(numbers, np.ndarray):
        return bodies, numbers
    of_mask = range(1, len(bodies) + 1)
    used = [number for number in of_mask if (numbers == number).any()] or list(of_mask[:1])
    if len(used) == len(bodies):
        return bodies, numbers
    places = np.zeros(len(bodies) + 1, numbers.dtype)
    places[used] = np.arange(1, len(used) + 1)
    return tuple(bodies[number - 1] for number in used), places[numbers]


def _units(mask: LocalMask, q_unit: int, kv_unit: int, tables: int) -> np.ndarray | jax.Array:
    """The kinds of units; a unit with padded keys is partial."""
    kinds = mask.kinds_of_heads(q_unit, kv_unit, tables)
    if not mask.kv_len % kv_unit:
        return kinds
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    last = (np.arange(kinds.shape[-1]) == kinds.shape[-1] - 1)[None, None, None]
    return xp.where(last, xp.minimum(kinds, 1), kinds)


def _bodies_at_run_time(
    mask: LocalMask, units: jax.Array, unit: tuple[int, int], blocks: tuple[int, int]
) -> tuple[tuple[Body, ...], jax.Array]:
    """(bodies, each tile's number) if units are known only on the device.

    One body leaves out what the mask's static part hides in the tiles at its edge, as they are with rows and keys that start
    at 0. A tile uses that body if it hides and shows as much.
    """
    bodies = run_time_bodies(mask, unit, blocks, units.shape[-2:])
    visible, number = (units > 0).any((-1, -2)), jnp.asarray(len(bodies))
    for place, body in reversed(list(enumerate(bodies[:-1], 1))):
        kinds = np.asarray(body.kinds)[None, None, None, None]
        fits = ((units == 0) | (kinds > 0)) & ((units == 2) | (kinds < 2))
        number = jnp.where(fits.all((-1, -2)), place, number)
    return bodies, jnp.where(visible, number, 0)


def run_time_bodies(
    mask: LocalMask, unit: tuple[int, int], blocks: tuple[int, int], of_block: tuple[int, ...]
) -> tuple[Body, ...]:
    """The bodies of a kernel whose tiles are known only on the device; the last one serves every tile."""
    edge = _edge(mask, unit, blocks, of_block)
    return (WHOLE, MASKED) if edge is None else (WHOLE, edge, MASKED)


def _edge(mask: LocalMask, unit: tuple[int, int], blocks: tuple[int, int], of_block: tuple[int, ...]) -> Body | None:
    """The body of the most tiles at the edge of the mask's static part; None if it would leave out nothing."""
    static = mask.mask.split_static()[0]
    if math.prod(of_block) == 1 or isinstance(static, Full) or "mask_function" in static.features():
        return None
    start = {"q_start": mask.q_start, "k_start": mask.k_start, "query_offset": mask.query_offset}
    known = {name: at if isinstance(at, int) else 0 for name, at in start.items()}
    kinds = static.live_blocks(*unit, q_len=mask.q_len, kv_len=mask.kv_len, **known)
    bodies, numbers = bodies_of(cells(kinds, blocks, (of_block[0], of_block[1])))
    saved = [(MASKED.work - body.work) * int((numbers == i).sum()) for i, body in enumerate(bodies, 1)]
    at_edge = [
        (gain, body) for gain, body in zip(saved, bodies, strict=True) if len(body.kinds) > 1 or len(body.kinds[0]) > 1
    ]
    return max(at_edge, key=lambda gained: gained[0])[1] if at_edge else None


def _ended(word: Any) -> Any:
    """A visit to the same place at which nothing is done: unchanged blocks aren't fetched again."""
    return word & ~(FIRST | LAST | BODY)


def _sorted_on_device(
    words: jax.Array, visited: jax.Array, length: int, tables: int, bodies: tuple[Body, ...]
) -> TileSchedule:
    rows = len(words)
    words, visited = words.reshape(rows, -1), visited.reshape(rows, -1)
    place = jnp.where(visited, visited.cumsum(-1) - 1, length)
    row = np.arange(rows)[:, None]
    listed = jnp.zeros((rows, length), jnp.int32).at[row, place].set(words, mode="drop")
    counts = visited.sum(-1, dtype=jnp.int32)
    end = _ended(jnp.take_along_axis(listed, counts[:, None] - 1, axis=1))  # a list repeats it beyond its end
    listed = jnp.where(np.arange(length, dtype=np.int32)[None] < counts[:, None], listed, end)
    distances = (None,) * len(bodies)
    return TileSchedule(listed.reshape(-1), rows // tables, length, counts.max(), bodies, distances, tables)


def live_tiles(known: Known, block_q: int, block_kv: int) -> np.ndarray:
    """The tiles that may have visible keys, bool [q blocks, kv blocks]."""
    outer = known.outer()
    if outer is None:
        return np.broadcast_to(True, (-(-known.q_len // block_q), -(-known.kv_len // block_kv)))
    static_part = {"q_start": known.q_start, "k_start": known.k_start, "query_offset": known.query_offset}
    return outer.live_blocks(block_q, block_kv, q_len=known.q_len, kv_len=known.kv_len, **static_part) > 0  # type: ignore[arg-type]


def most_steps(visible: np.ndarray, slow: str, kv_blocks: slice = slice(None)) -> int:
    """The most visits of a list; exact if the whole mask is static and has row intervals."""
    # A block of the slow axis has as many visits as live tiles, and one if there are none.
    return int(np.maximum(visible[:, kv_blocks].sum(axis=1 if slow == "q" else 0), 1).sum())


def fewest_steps(known: Known, block_q: int, block_kv: int) -> int:
    """Some of the live tiles: those that the first row of each query block sees. A cheap lower bound for many rows."""
    outer = known.outer()
    if outer is None:
        return live_tiles(known, block_q, block_kv).size
    q_start, k_start = known.q_start or 0, known.k_start or 0
    rows = np.arange(0, known.q_len, block_q, dtype=np.int64) + q_start
    intervals = outer.row_intervals(rows, k_start + known.kv_len, query_offset=known.query_offset or 0)
    if intervals is None:  # blocks that differ between heads
        return int(np.maximum(live_tiles(known, block_q, block_kv).sum(axis=1), 1).sum())
    lo, hi = (np.maximum(x - k_start, 0) for x in intervals)
    steps, done = 0, np.zeros(len(rows), np.int64)
    for first, end in zip(lo // block_kv, np.where(lo < hi, -(-hi // block_kv), 0), strict=True):
        steps += int(np.maximum(end - np.maximum(first, done), 0).sum())
        done = np.maximum(done, end)
    return steps
