"""Drawn: draw a mask as a picture of tiles, from intervals and block bounds, without building the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from ..errors import MaskError, shown
from .blocks import Grid, live_blocks
from .bounds import Blocks, Extent
from .checks import whole
from .heads import check_batches, with_equal_heads
from .node import Leaf, M, Node

if TYPE_CHECKING:
    from ..drawing import TilePicture

__all__ = ["Drawn"]

_SIDE = 32  # most tiles per side by default
_MAX_TILES = 2**24
_MAX_TESTS = 2**24  # tested cells of a mask function
_SHORTEST, _LONGEST = 16, 2**17  # range of default lengths
_MAX_ROWS = 2**24  # each row is examined
_UNKNOWN = "partial: some of it is visible, or this depends on the call's arrays"


class Drawn(Node[M]):
    """A node that can be drawn, given its static bounds. Mask is its subclass."""

    def bounds(self) -> tuple[M, M]:
        """Static masks (lower, upper) with lower ⊆ self ⊆ upper."""
        raise NotImplementedError

    def draw(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        query_offset: int = 0,
        block: int | Sequence[int] | None = None,
        batch: int = 0,
    ) -> TilePicture:
        """Draw the mask as dead, partial and full tiles. Print the picture or show it in a notebook; it has `svg()` and
        `save(path)`.

        The lengths default to those of the mask's arrays, or else to lengths that show its structure. block: the tile size, or
        (queries, keys); by default there are at most 32 tiles per side. batch: the row of the mask's arrays. Errors: MaskError.
        """
        check_batches(self)
        mask: Any = with_equal_heads(self)
        return _draw(self.describe(), mask, mask.bounds(), q_len, kv_len, query_offset, block, batch)

    def _repr_html_(self) -> str:
        return self.draw().svg()


def _draw(
    title: str,
    mask: Node[Any],
    bounds: tuple[Node[Any], Node[Any]],
    q_len: int | None,
    kv_len: int | None,
    query_offset: int,
    block: int | Sequence[int] | None,
    batch: int,
) -> TilePicture:
    """See Drawn.draw; `bounds` are the mask's."""
    _, leaves = mask.split()
    q_known, kv_known = (_size(mask, leaves, dim) for dim in ("q", "kv"))
    known_length = next((n for n in (q_len, kv_len, q_known, kv_known) if n is not None), None)
    length = _default_length(mask) if known_length is None else known_length
    q_len = whole(next(n for n in (q_len, q_known, length) if n is not None), "q_len", minimum=1)
    kv_len = whole(next(n for n in (kv_len, kv_known, length) if n is not None), "kv_len", minimum=1)
    if q_len > _MAX_ROWS:
        raise MaskError(
            f"q_len={q_len}; at most {_MAX_ROWS} rows can be drawn: give a smaller q_len, and a query_offset"
        )
    rows = max([1, *(np.shape(leaf.array)[0] for leaf in leaves if leaf.array is not None)])
    if whole(batch, "batch", minimum=0) >= rows:
        raise MaskError(f"batch={batch}; wanted 0 to {rows - 1}, a row of the mask's arrays")
    blocks = _blocks(block, q_len, kv_len)
    grid = Grid(*blocks, q_len, kv_len, 0, query_offset)
    if grid.shape[0] * grid.shape[1] > _MAX_TILES:
        raise MaskError(
            f"{grid.shape[0]} x {grid.shape[1]} tiles of {blocks[0]} x {blocks[1]}; at most {_MAX_TILES} can be drawn: give a "
            "larger block"
        )
    tiles, remark = _tiles(mask, bounds, leaves, grid, batch)
    from ..drawing import TilePicture

    return TilePicture(title, tiles, q_len, kv_len, *blocks, _visible(mask, grid), remark)


def _tiles(
    mask: Node[Any], bounds: tuple[Node[Any], Node[Any]], leaves: tuple[Leaf, ...], grid: Grid, batch: int
) -> tuple[NDArray[np.int8], str]:
    """The tiles, int8 [rows, columns], and the remarks on them."""
    known = mask.intervals(np.zeros(1, np.int64), np.zeros(1, np.int64), grid.kv_len) is not None
    if mask.is_static and (known or grid.q_len * grid.kv_len <= _MAX_TESTS):
        return live_blocks(mask, mask, grid), ""
    if mask.is_static:
        return _bounded(mask, grid, 0), "partial: some of it is visible, or this depends on the function"
    block_mask = live_blocks(*bounds, grid)
    if not all(_has_values(leaf.array) for leaf in leaves):
        return block_mask, _UNKNOWN
    bounded = _bounded(mask.narrow(slice(0, grid.q_len), slice(0, grid.kv_len)), grid, batch)
    block_mask = np.where(block_mask == 1, bounded, block_mask)
    row = f"row {batch} of the batch" if any(leaf.array.shape[0] > 1 for leaf in leaves) else ""
    doubt = "" if grid.block_q == grid.block_kv == 1 else "a tile that is called partial may be dead or full"
    return block_mask, "; ".join(filter(None, (row, doubt)))


def _bounded(mask: Node[Any], grid: Grid, batch: int) -> NDArray[np.int8]:
    """Tiles from block bounds, which report partial in doubt."""
    ends = []
    for length, block, offset in ((grid.q_len, grid.block_q, 0), (grid.kv_len, grid.block_kv, 0)):
        first = np.arange(offset, length, block, dtype=np.int32)
        ends.append(Extent(first, np.minimum(first + block, length).astype(np.int32) - 1))
    rows, cols = Extent(*(x[None, None, :, None] for x in ends[0])), Extent(*(x[None, None, None, :] for x in ends[1]))
    positions = Extent(*(x + np.int32(grid.query_offset) for x in rows))
    with jax.ensure_compile_time_eval():
        some, every = mask.block_bounds(Blocks(rows, positions, cols, grid.block_q, grid.block_kv))
        some, every = (_of_row(np.asarray(x), batch) for x in (some, every))
    # With several heads, a tile is full if all heads see all of it, and dead if none sees any of it.
    some, every = some.any(axis=0), every.all(axis=0)
    tiles = np.where(every & some, 2, np.where(some, 1, 0)).astype(np.int8)
    return np.broadcast_to(tiles, grid.shape)


def _of_row(array: NDArray[np.bool_], batch: int) -> NDArray[np.bool_]:
    """One batch row, [heads | 1, q blocks, kv blocks], of an array that broadcasts to [batch, heads, q blocks, kv blocks]."""
    whole = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return whole[batch if whole.shape[0] > 1 else 0]


def _visible(mask: Node[Any], grid: Grid) -> float | None:
    """The share of the matrix that is visible, from intervals."""
    count = 0
    for _, rows in grid.slabs():
        known = mask.intervals(rows, rows + grid.query_offset, grid.kv_len)
        if known is None:
            return None
        count += int((known[1] - known[0]).sum())
    return count / (grid.q_len * grid.kv_len)


def _size(mask: Node[Any], leaves: tuple[Leaf, ...], dim: str) -> int | None:
    """The size of a dimension, from the leaves and their arrays."""
    fixed = [leaf.fixed_lengths()[("q", "kv").index(dim)] for leaf in mask.leaves()]
    sizes = [size for size in fixed if size is not None]
    sizes += [
        size for leaf in leaves for name, size in zip(leaf.dims, np.shape(leaf.array), strict=False) if name == dim
    ]
    return max((size for size in sizes if size > 1), default=None)


def _default_length(mask: Node[Any]) -> int:
    """Four times the largest number in the mask, in whole tiles."""
    numbers = [abs(x) for leaf in mask.leaves() for x in leaf._fields().values() if isinstance(x, int)]
    length = min(max([_SHORTEST, *(4 * n for n in numbers)]), _LONGEST)
    block = _block(length)
    return -(-length // block) * block


def _block(length: int) -> int:
    """The smallest power of two that gives few enough tiles."""
    return 1 << max(0, (-(-length // _SIDE) - 1).bit_length())


def _blocks(block: Any, q_len: int, kv_len: int) -> tuple[int, int]:
    if block is None:
        return _block(q_len), _block(kv_len)
    sizes = block if isinstance(block, tuple | list) else (block, block)
    if len(sizes) != 2:
        raise MaskError(f"block={shown(block)}; wanted a size, or one of queries and one of keys: block=(512, 1024)")
    first, second = (whole(size, "block", minimum=1) for size in sizes)
    return first, second


def _has_values(array: Any) -> bool:
    if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct) or array is None:
        return False
    return isinstance(array, np.ndarray) or (isinstance(array, jax.Array) and array.is_fully_addressable)
