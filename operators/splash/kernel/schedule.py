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
from .variants import MASKED, WHOLE, KernelVariant, cells, variants_of

__all__ = [
    "FIRST", "LAST", "MAX_KV_BLOCKS", "MAX_Q_BLOCKS", "MAX_WORDS", "VARIANT", "StaticMask", "TileSchedule",
    "kv_block_of", "live_tiles", "max_steps", "min_steps", "q_block_of", "run_time_variants", "tile_schedule",
    "tile_variants", "variant_of", "variants_of_part",
]  # fmt: skip

# A word's low bits: the first and the last entry of a block of the slow axis; the number of the tile's
# variant, 0 if nothing is visible.
FIRST, LAST, VARIANT = 1, 2, 12
_KV_BITS = 12
MAX_KV_BLOCKS, MAX_Q_BLOCKS = 1 << _KV_BITS, 1 << (31 - 4 - _KV_BITS)
_MAX_SUBTILES = 1 << 22  # the most sub-tiles to check; with more, tiles are treated whole
MAX_WORDS = SCALAR_BYTES // 4 * 7 // 8  # leaves some scalar memory for the compiler


class StaticMask(NamedTuple):
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
    def of(cls, mask: LocalMask) -> StaticMask:
        """The knowledge of a kernel's mask."""
        offset = 0 if mask.query_offset is None else mask.query_offset
        starts = (x if isinstance(x, int) else None for x in (mask.q_start, mask.k_start, offset))
        return cls(mask.mask, mask.q_len, mask.kv_len, *starts)

    def outer(self) -> Mask | None:
        """A mask with row intervals that covers everything visible; None if a traced place leaves nothing known."""
        if self.q_start is None or self.k_start is None or self.query_offset is None:
            return None
        # A mask function is only known weight by weight.
        parts = self.mask.split_static()[0].conjuncts()
        return And([part for part in parts if "mask_function" not in part.features()])


class TileSchedule(NamedTuple):
    """`words` int32 [rows * tables * length]: a list for each batch row, or one for all, and for each group of heads.

    `length` is a list's length, `covered` the part of it that the grid covers. `variants`: those used by entries; the first has
    number 1. `distances`: for each of them, the first row of its tiles less their first key, in the whole problem; None if that
    differs between them, or isn't known on the host.
    """

    words: np.ndarray | jax.Array
    rows: int
    length: int
    covered: int | jax.Array
    variants: tuple[KernelVariant, ...]
    distances: tuple[int | None, ...]
    tables: int = 1

    @property
    def tiles(self) -> float:
        """The most tiles computed for one list: parts of tiles that are left out don't count."""
        if not isinstance(self.words, np.ndarray):
            return self.length
        counts = np.bincount(variant_of(self.words), minlength=len(self.variants) + 1)[1:]
        return sum(count * variant.computed for count, variant in zip(counts, self.variants, strict=True)) / self.tables


def q_block_of(entry: Any) -> Any:
    """The query block of an entry."""
    return entry >> (4 + _KV_BITS)


def kv_block_of(entry: Any) -> Any:
    """The kv block of an entry."""
    return (entry >> 4) & (MAX_KV_BLOCKS - 1)


def variant_of(entry: Any) -> Any:
    """The number of an entry's variant; 0 for none."""
    return (entry & VARIANT) >> 2


def tile_schedule(
    mask: LocalMask,
    block_q: int,
    block_kv: int,
    slow: str,
    kv_blocks: slice = slice(None),
    tables: int = 1,
    subtile: tuple[int, int] | None = None,
) -> TileSchedule:
    """List the tiles with visible keys, by query block (`slow` is 'q') or by kv block ('kv').

    A block of the slow axis without any is still visited once, because its output must be written. Padded
    keys aren't visible. kv_blocks: those that the list covers. tables: groups of heads with their own lists, if
    heads have different blocks. sub-tile: the queries and keys of a sub-tile, which variants consist of; None: one sub-tile for
    the whole tile.
    """
    variants, numbers = tile_variants(mask, (block_q, block_kv), subtile or (block_q, block_kv), tables)
    tables = numbers.shape[1]
    variants, numbers = variants_of_part(variants, numbers.reshape(-1, *numbers.shape[2:])[..., kv_blocks])
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
    words = (((q_block << _KV_BITS) | kv_block) << 4) + ends + numbers.astype(np.int32) * (VARIANT & -VARIANT)
    if isinstance(numbers, np.ndarray):
        lists = [of_row[here].astype(np.int32) for of_row, here in zip(words, visited, strict=True)]
        length = max(map(len, lists))
        listed = np.concatenate([np.concatenate([x, np.repeat(_ended(x[-1:]), length - len(x))]) for x in lists])
        distances = _distances(mask, numbers, q_block * block_q - kv_block * block_kv, len(variants))
        return TileSchedule(listed, 1, length, length, variants, distances, tables)
    length = max_steps(live_tiles(StaticMask.of(mask), block_q, block_kv), slow, kv_blocks)
    return _sorted_on_device(words.astype(jnp.int32), visited, length, tables, variants)


def _distances(
    mask: LocalMask, numbers: np.ndarray, tile_distances: np.ndarray, variants: int
) -> tuple[int | None, ...]:
    """TileSchedule's, for the number of each tile's variant, and each tile's first local row less its first local key."""
    if not isinstance(mask.q_start, int) or not isinstance(mask.k_start, int):
        return (None,) * variants
    values = [
        np.unique(np.broadcast_to(tile_distances, numbers.shape)[numbers == number])
        for number in range(1, variants + 1)
    ]
    return tuple(
        int(distances[0]) + mask.q_start - mask.k_start if len(distances) == 1 else None for distances in values
    )


def tile_variants(
    mask: LocalMask, block: tuple[int, int], subtile: tuple[int, int], tables: int = 1
) -> tuple[tuple[KernelVariant, ...], np.ndarray | jax.Array]:
    """(variants, each tile's number int8 [rows, tables | 1, q blocks, kv blocks]) for blocks of queries and keys, and sub-tiles.

    If there are too many sub-tiles to check, a tile is one sub-tile.
    """
    count = -(-mask.q_len // block[0]), -(-mask.kv_len // block[1])
    of_block = block[0] // subtile[0], block[1] // subtile[1]
    if math.prod(count) * math.prod(of_block) * tables > _MAX_SUBTILES:
        subtile, of_block = block, (1, 1)
    subtile_kinds = cells(_subtile_kinds(mask, *subtile, tables), count, of_block)
    return (
        variants_of(subtile_kinds)
        if isinstance(subtile_kinds, np.ndarray)
        else _variants_at_run_time(mask, subtile_kinds, subtile, count)
    )


def variants_of_part(
    variants: tuple[KernelVariant, ...], numbers: np.ndarray | jax.Array
) -> tuple[tuple[KernelVariant, ...], np.ndarray | jax.Array]:
    """(the variants that some of the tiles use, their numbers there), so that a kernel for these tiles has no others."""
    if not isinstance(numbers, np.ndarray):
        return variants, numbers
    of_mask = range(1, len(variants) + 1)
    used = [number for number in of_mask if (numbers == number).any()] or list(of_mask[:1])
    if len(used) == len(variants):
        return variants, numbers
    places = np.zeros(len(variants) + 1, numbers.dtype)
    places[used] = np.arange(1, len(used) + 1)
    return tuple(variants[number - 1] for number in used), places[numbers]


def _subtile_kinds(mask: LocalMask, q_subtile: int, kv_subtile: int, tables: int) -> np.ndarray | jax.Array:
    """The kinds of sub-tiles; a sub-tile with padded keys is partial."""
    kinds = mask.kinds_of_heads(q_subtile, kv_subtile, tables)
    if not mask.kv_len % kv_subtile:
        return kinds
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    last = (np.arange(kinds.shape[-1]) == kinds.shape[-1] - 1)[None, None, None]
    return xp.where(last, xp.minimum(kinds, 1), kinds)


def _variants_at_run_time(
    mask: LocalMask, subtile_kinds: jax.Array, subtile: tuple[int, int], blocks: tuple[int, int]
) -> tuple[tuple[KernelVariant, ...], jax.Array]:
    """(variants, each tile's number) if sub-tiles are known only on the device.

    One variant leaves out what the mask's static part hides in the tiles at its edge, as they are with rows and keys that start
    at 0. A tile uses that variant if it hides and shows as much.
    """
    variants = run_time_variants(mask, subtile, blocks, subtile_kinds.shape[-2:])
    visible, number = (subtile_kinds > 0).any((-1, -2)), jnp.asarray(len(variants))
    for place, variant in reversed(list(enumerate(variants[:-1], 1))):
        kinds = np.asarray(variant.kinds)[None, None, None, None]
        fits = ((subtile_kinds == 0) | (kinds > 0)) & ((subtile_kinds == 2) | (kinds < 2))
        number = jnp.where(fits.all((-1, -2)), place, number)
    return variants, jnp.where(visible, number, 0)


def run_time_variants(
    mask: LocalMask, subtile: tuple[int, int], blocks: tuple[int, int], of_block: tuple[int, ...]
) -> tuple[KernelVariant, ...]:
    """The variants of a kernel whose tiles are known only on the device; the last one serves every tile."""
    edge = _edge(mask, subtile, blocks, of_block)
    return (WHOLE, MASKED) if edge is None else (WHOLE, edge, MASKED)


def _edge(
    mask: LocalMask, subtile: tuple[int, int], blocks: tuple[int, int], of_block: tuple[int, ...]
) -> KernelVariant | None:
    """The variant of the most tiles at the edge of the mask's static part; None if it would leave out nothing."""
    static = mask.mask.split_static()[0]
    if math.prod(of_block) == 1 or isinstance(static, Full) or "mask_function" in static.features():
        return None
    places = {"q_start": mask.q_start, "k_start": mask.k_start, "query_offset": mask.query_offset}
    starts = {name: at if isinstance(at, int) else 0 for name, at in places.items()}
    kinds = static.live_blocks(*subtile, q_len=mask.q_len, kv_len=mask.kv_len, **starts)
    variants, numbers = variants_of(cells(kinds, blocks, (of_block[0], of_block[1])))
    saved = [(MASKED.work - variant.work) * int((numbers == i).sum()) for i, variant in enumerate(variants, 1)]
    at_edge = [
        (gain, variant)
        for gain, variant in zip(saved, variants, strict=True)
        if len(variant.kinds) > 1 or len(variant.kinds[0]) > 1
    ]
    return max(at_edge, key=lambda gained: gained[0])[1] if at_edge else None


def _ended(entry: Any) -> Any:
    """An entry for the same place at which nothing is done: unchanged blocks aren't fetched again."""
    return entry & ~(FIRST | LAST | VARIANT)


def _sorted_on_device(
    words: jax.Array, visited: jax.Array, length: int, tables: int, variants: tuple[KernelVariant, ...]
) -> TileSchedule:
    rows = len(words)
    words, visited = words.reshape(rows, -1), visited.reshape(rows, -1)
    place = jnp.where(visited, visited.cumsum(-1) - 1, length)
    row = np.arange(rows)[:, None]
    listed = jnp.zeros((rows, length), jnp.int32).at[row, place].set(words, mode="drop")
    counts = visited.sum(-1, dtype=jnp.int32)
    end = _ended(jnp.take_along_axis(listed, counts[:, None] - 1, axis=1))  # a list repeats it beyond its end
    listed = jnp.where(np.arange(length, dtype=np.int32)[None] < counts[:, None], listed, end)
    distances = (None,) * len(variants)
    return TileSchedule(listed.reshape(-1), rows // tables, length, counts.max(), variants, distances, tables)


def live_tiles(static_mask: StaticMask, block_q: int, block_kv: int) -> np.ndarray:
    """The tiles that may have visible keys, bool [q blocks, kv blocks]."""
    outer = static_mask.outer()
    if outer is None:
        return np.broadcast_to(True, (-(-static_mask.q_len // block_q), -(-static_mask.kv_len // block_kv)))
    starts = {"q_start": static_mask.q_start, "k_start": static_mask.k_start, "query_offset": static_mask.query_offset}
    return outer.live_blocks(block_q, block_kv, q_len=static_mask.q_len, kv_len=static_mask.kv_len, **starts) > 0  # type: ignore[arg-type]


def max_steps(visible: np.ndarray, slow: str, kv_blocks: slice = slice(None)) -> int:
    """The most entries of a list; exact if the whole mask is static and has row intervals."""
    # A block of the slow axis has as many entries as live tiles, and one if there are none.
    return int(np.maximum(visible[:, kv_blocks].sum(axis=1 if slow == "q" else 0), 1).sum())


def min_steps(static_mask: StaticMask, block_q: int, block_kv: int) -> int:
    """Some of the live tiles: those that the first row of each query block sees. A cheap lower bound for many rows."""
    outer = static_mask.outer()
    if outer is None:
        return live_tiles(static_mask, block_q, block_kv).size
    q_start, k_start = static_mask.q_start or 0, static_mask.k_start or 0
    rows = np.arange(0, static_mask.q_len, block_q, dtype=np.int64) + q_start
    intervals = outer.row_intervals(rows, k_start + static_mask.kv_len, query_offset=static_mask.query_offset or 0)
    if intervals is None:  # blocks that differ between heads
        return int(np.maximum(live_tiles(static_mask, block_q, block_kv).sum(axis=1), 1).sum())
    lo, hi = (np.maximum(x - k_start, 0) for x in intervals)
    steps, done = 0, np.zeros(len(rows), np.int64)
    for first, end in zip(lo // block_kv, np.where(lo < hi, -(-hi // block_kv), 0), strict=True):
        steps += int(np.maximum(end - np.maximum(first, done), 0).sum())
        done = np.maximum(done, end)
    return steps
