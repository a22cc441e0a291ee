"""The static leaves other than Full: hashable, serialisable, and known before any array is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from .algebra import Mask
from .bounds import BlockBounds, Blocks, Extent, between, equal
from .checks import check_distances, whole, whole_or_none
from .intervals import Intervals, single

__all__ = ["Causal", "Chunked", "OffsetMask", "Prefix", "SlidingWindow", "SpanMask", "window_tokens"]


# Not a dataclass itself: `offset` would come first among the fields of its subclasses.
class OffsetMask(Mask):
    """A static leaf that compares the key with the row's position, or with the row plus the leaf's own offset."""

    offset: int | None

    @property
    def needs_offset(self) -> bool:
        return self.offset is None

    def with_offset(self, offset: int | None) -> Mask:
        return type(self)(**{**vars(self), "offset": offset})

    def position(self, rows: Any, positions: Any) -> Any:
        """The row's index plus the offset; without an offset, the call's position."""
        if self.offset is None:
            return positions
        return rows + self.offset if self.offset else rows

    def block_positions(self, blocks: Blocks) -> Extent:
        """`position` for whole blocks."""
        return Extent(*(self.position(row, at) for row, at in zip(blocks.rows, blocks.positions, strict=True)))

    def _check_offset(self) -> None:
        none, traced = (
            "the call's position",
            "leave it out and pass query_offset to the call, which may be an array [batch]",
        )
        offset = whole_or_none(self.offset, f"{type(self).__name__} offset", none, traced=traced)
        object.__setattr__(self, "offset", offset)


class SpanMask(OffsetMask):
    """An OffsetMask of which each row sees keys that follow one another, and each key rows that do."""

    def key_span(self, x: Any) -> tuple[Any, Any]:
        """The keys that rows at x see: (the first, the one after the last), None without a bound. x: numbers as in `test`."""
        raise NotImplementedError

    def row_span(self, keys: Any) -> tuple[Any, Any]:
        """The same of keys: the x of the rows that see them."""
        raise NotImplementedError

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        first, end = self.key_span(self.position(rows, positions))
        return single(0 if first is None else first, kv_len if end is None else end, len(rows), kv_len)


@dataclass(frozen=True)
class Causal(SpanMask):
    """Key j is visible when j <= x, where x is the position, or i + offset."""

    kind: ClassVar[str] = "causal"
    offset: int | None = None

    @property
    def by_distance(self) -> bool:
        return True

    def __post_init__(self) -> None:
        self._check_offset()

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return cols <= self.position(rows, positions)

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        x = self.block_positions(blocks)
        return BlockBounds(blocks.cols.lo <= x.hi, blocks.cols.hi <= x.lo)

    def key_span(self, x: Any) -> tuple[Any, Any]:
        return None, x + 1

    def row_span(self, keys: Any) -> tuple[Any, Any]:
        return keys, None


@dataclass(frozen=True)
class SlidingWindow(SpanMask):
    """Key j is visible when x - left <= j <= x + right. Distances are inclusive; None means no bound on that side.

    `left=3, right=0` keeps 4 keys; `window_tokens(4)` is the same, given the number of keys.
    """

    kind: ClassVar[str] = "sliding_window"
    label: ClassVar[str] = "window"
    left: int | None = None
    right: int | None = 0
    offset: int | None = None

    @property
    def by_distance(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check_distances(self)
        self._check_offset()

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        ahead = cols - self.position(rows, positions)
        if self.left is None:
            return ahead <= self.right
        if self.right is None:
            return ahead >= -self.left
        return (ahead >= -self.left) & (ahead <= self.right)

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        x, keys = self.block_positions(blocks), blocks.cols
        lower = None if self.left is None else Extent(-self.left, -self.left)
        upper = None if self.right is None else Extent(self.right, self.right)
        return between(lower, Extent(keys.lo - x.hi, keys.hi - x.lo), upper)

    def key_span(self, x: Any) -> tuple[Any, Any]:
        return None if self.left is None else x - self.left, None if self.right is None else x + (self.right + 1)

    def row_span(self, keys: Any) -> tuple[Any, Any]:
        return None if self.right is None else keys - self.right, None if self.left is None else keys + (self.left + 1)


def window_tokens(n: int) -> SlidingWindow:
    """The window of the last n keys, including the row's own."""
    traced = "use Positions(query - (n - 1), kv, left=0, right=None) & Causal()"
    return SlidingWindow(left=whole(n, "window_tokens n", minimum=1, traced=traced) - 1, right=0)


@dataclass(frozen=True)
class Chunked(SpanMask):
    """Key j is visible when x and j are in the same chunk of `size`: floor(x / size) == floor(j / size).

    A row with negative x sees nothing, as no key is negative.
    """

    kind: ClassVar[str] = "chunked"
    size: int
    offset: int | None = None

    def __post_init__(self) -> None:
        traced = "use SegmentIds(query // size, kv // size) of positions"
        object.__setattr__(self, "size", whole(self.size, "Chunked size", minimum=1, traced=traced))
        self._check_offset()

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        x = self.position(rows, positions)
        if self.size & (self.size - 1) == 0:
            shift = self.size.bit_length() - 1  # an arithmetic shift rounds down, also for negative x
            return (x >> shift) == (cols >> shift)
        # lax.div is one instruction but rounds -1 / size to 0; x >= 0 corrects that.
        return (_divide(x, self.size) == _divide(cols, self.size)) & (x >= 0)

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        # `//` rounds down in NumPy and in jnp. No key is negative, so a row at a negative x matches none.
        x, keys = (Extent(e.lo // self.size, e.hi // self.size) for e in (self.block_positions(blocks), blocks.cols))
        return equal(x, keys)

    def key_span(self, x: Any) -> tuple[Any, Any]:
        if self.size & (self.size - 1) == 0:
            start = x & -self.size
        elif isinstance(x, jax.Array):
            start = jnp.where(x < 0, -self.size, _divide(x, self.size) * self.size)  # no key is negative
        else:
            start = x // self.size * self.size
        return start, start + self.size

    def row_span(self, keys: Any) -> tuple[Any, Any]:
        return self.key_span(keys)


@dataclass(frozen=True)
class Prefix(Mask):
    """Keys before `length` are visible; with 0 none are."""

    kind: ClassVar[str] = "prefix"
    length: int

    def __post_init__(self) -> None:
        traced = "use Lengths, int [batch]"
        object.__setattr__(self, "length", whole(self.length, "Prefix length", minimum=0, traced=traced))

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return cols < self.length

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        return BlockBounds(blocks.cols.lo < self.length, blocks.cols.hi < self.length)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        return single(0, self.length, len(rows), kv_len)


def _divide(x: Any, size: int) -> Any:
    return jax.lax.div(x, jnp.full_like(x, size)) if isinstance(x, jax.Array) else x // size
