"""The live blocks of a mask that contains Blocks: join the answers of its parts, and test cells where that doesn't decide.

Two parts that are both partial in a block may have no cell in common. If a Blocks leaf is dead or full in the block, which is
always so if the requested blocks divide its own, no cells have to be tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .grid import CELLS, Grid
from .node import Node

__all__ = ["has_blocks", "joined_heads", "tree_blocks"]

_LOOKS = 4  # rows of a block that are tested first


def has_blocks(mask: Node[Any]) -> bool:
    """Whether a mask contains a Blocks leaf."""
    return any(leaf.kind == "blocks" for leaf in mask.leaves())


def joined_heads(block_mask: NDArray[np.int8]) -> NDArray[np.int8]:
    """Join all heads, int8 [q blocks, kv blocks]: dead or full where every head is."""
    lowest, highest = block_mask.min(axis=0), block_mask.max(axis=0)
    return np.where(lowest == 2, 2, np.minimum(highest, 1)).astype(np.int8)


def tree_blocks(mask: Node[Any], grid: Grid, plain: Callable[[Node[Any], Grid], NDArray[np.int8]]) -> NDArray[np.int8]:
    """0 dead, 1 partial, 2 full, int8 [heads | 1, q blocks, kv blocks], exact. plain: the same for a mask without Blocks."""
    block_mask, sure = _block_mask(mask, grid, plain)
    if sure.all():
        return block_mask
    block_mask = np.array(block_mask)
    tiles = np.argwhere(~sure.all(axis=0)).astype(np.int32)
    step = max(1, CELLS // (len(block_mask) * _LOOKS * grid.block_kv))
    looks = np.linspace(0, grid.block_q - 1, _LOOKS).astype(np.int32)
    for first in range(0, len(tiles), step):
        some = tiles[first : first + step]
        seen = _seen(mask, grid, some, looks)
        any_seen, all_seen = _of_tiles(seen)
        mixed = any_seen & ~all_seen
        sure[:, some[:, 0], some[:, 1]] |= mixed  # some cells are visible and some aren't: partial is right
    tiles = np.argwhere(~sure.all(axis=0)).astype(np.int32)
    step = max(1, CELLS // (len(block_mask) * grid.block_q * grid.block_kv))
    rows = np.arange(grid.block_q, dtype=np.int32)
    for first in range(0, len(tiles), step):
        some = tiles[first : first + step]
        seen = _seen(mask, grid, some, rows)
        any_seen, all_seen = _of_tiles(seen)
        block_mask[:, some[:, 0], some[:, 1]] = any_seen.astype(np.int8) + all_seen
    return block_mask


def _of_tiles(seen: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(any, all) of the result of `_seen`: [heads, tiles]."""
    by_head = np.swapaxes(seen, 0, 1)
    return np.any(by_head, axis=(2, 3)), np.all(by_head, axis=(2, 3))


def _block_mask(mask: Node[Any], grid: Grid, plain: Any) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """(the block mask, where it is certain): elsewhere a partial block may also be dead or full."""
    if not has_blocks(mask):
        block_mask = plain(mask, grid)[None]
        return block_mask, np.ones(block_mask.shape, bool)
    if mask.kind == "blocks":
        block_mask = mask.block_mask(*_edges(grid))  # type: ignore[attr-defined]
        return block_mask, np.ones(block_mask.shape, bool)
    if mask.kind == "not":
        block_mask, sure = _block_mask(mask.children()[0], grid, plain)
        return 2 - block_mask, sure
    flat = [child for child in mask.children() if not has_blocks(child)]
    parts = [child for child in mask.children() if has_blocks(child)]
    if flat:
        parts.insert(0, mask.with_children(flat))
    both, sure = _block_mask(parts[0], grid, plain)
    for part in parts[1:]:
        other, also = _block_mask(part, grid, plain)
        either = np.minimum(both, other) if mask.kind == "and" else np.maximum(both, other)
        sure = (either != 1) | (((both != 1) | (other != 1)) & sure & also)
        both = either
    return both, np.broadcast_to(sure, both.shape).copy()


def _edges(grid: Grid) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The first and last row, and the first and last key, of each block."""
    edges = []
    for count, block, length, start in (
        (grid.shape[0], grid.block_q, grid.q_len, grid.q_start),
        (grid.shape[1], grid.block_kv, grid.kv_len, grid.k_start),
    ):
        first = np.arange(count, dtype=np.int64) * block
        edges.append((first + start, np.minimum(first + block, length) - 1 + start))
    return edges[0], edges[1]


def _seen(mask: Node[Any], grid: Grid, tiles: NDArray[np.int32], looks: NDArray[np.int32]) -> NDArray[np.bool_]:
    """The visible cells in these rows of tiles: bool [tiles, heads, rows, block_kv]. Past an end, the last row or key repeats."""
    row, col = tiles[:, 0, None] * np.int32(grid.block_q), tiles[:, 1, None] * np.int32(grid.block_kv)
    rows = np.minimum(row + looks, np.int32(grid.q_len - 1))[:, None, :, None] + np.int32(grid.q_start)
    keys = np.arange(grid.block_kv, dtype=np.int32)
    cols = np.minimum(col + keys, np.int32(grid.kv_len - 1))[:, None, None, :] + np.int32(grid.k_start)
    seen = mask.test(rows, rows + np.int32(grid.query_offset), cols)
    return np.broadcast_to(seen, np.broadcast_shapes(seen.shape, (len(tiles), 1, len(looks), grid.block_kv)))
