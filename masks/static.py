"""The static leaves: hashable, serialisable, known before any array is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from ..errors import MaskError
from .base import Mask
from .checks import whole, whole_or_none
from .intervals import Intervals, single
from .reach import Blocks, Extent, Reach, between

__all__ = [
    "Causal",
    "Chunked",
    "Full",
    "OffsetMask",
    "Prefix",
    "SlidingWindow",
    "StaticLeaf",
    "window_tokens",
]


@dataclass(frozen=True)
class StaticLeaf(Mask):
    """A leaf whose dataclass fields say everything about it."""

    label: ClassVar[str] = ""

    def describe(self) -> str:
        fields = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        text = ", ".join(f"{name}={value!r}" for name, value in fields if (name, value) != ("offset", None))
        return f"{self.label or self.kind}({text})" if text else self.label or self.kind

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


# Not a dataclass itself, or `offset` would come first among the fields of its subclasses.
class OffsetMask(StaticLeaf):
    """A static leaf that compares the row's position, or the row plus its own offset, with the key."""

    offset: int | None

    @property
    def needs_offset(self) -> bool:
        return self.offset is None

    def with_offset(self, offset: int | None) -> Mask:
        return type(self)(**{**vars(self), "offset": offset})

    def place(self, rows: Any, positions: Any) -> Any:
        """Where the row stands among the keys."""
        if self.offset is None:
            return positions
        return rows + self.offset if self.offset else rows

    def places(self, blocks: Blocks) -> Extent:
        """`place` of whole blocks."""
        return Extent(*(self.place(row, at) for row, at in zip(blocks.rows, blocks.positions, strict=True)))

    def _check_offset(self) -> None:
        none = "the position that the call gives"
        object.__setattr__(self, "offset", whole_or_none(self.offset, f"{type(self).__name__} offset", none))


@dataclass(frozen=True)
class Full(StaticLeaf):
    """Every key is visible."""

    kind: ClassVar[str] = "full"

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return (rows - rows) == (cols - cols)

    def reach(self, blocks: Blocks) -> Reach:
        seen = self.test(blocks.rows.lo, None, blocks.cols.lo)
        return Reach(seen, seen)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        return single(0, kv_len, len(rows), kv_len)

    def conjuncts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True)
class Causal(OffsetMask):
    """Key j is visible when j <= x, where x is the position, or i + offset."""

    kind: ClassVar[str] = "causal"
    offset: int | None = None

    def __post_init__(self) -> None:
        self._check_offset()

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return cols <= self.place(rows, positions)

    def reach(self, blocks: Blocks) -> Reach:
        x = self.places(blocks)
        return Reach(blocks.cols.lo <= x.hi, blocks.cols.hi <= x.lo)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        return single(0, self.place(rows, positions) + 1, len(rows), kv_len)


@dataclass(frozen=True)
class SlidingWindow(OffsetMask):
    """Key j is visible when x - left <= j <= x + right: inclusive distances, None for no bound on that side.

    `left=3, right=0` keeps 4 keys; `window_tokens(4)` says the same by the number of keys.
    """

    kind: ClassVar[str] = "sliding_window"
    label: ClassVar[str] = "window"
    left: int | None = None
    right: int | None = 0
    offset: int | None = None

    def __post_init__(self) -> None:
        if self.left is None and self.right is None:
            raise MaskError("SlidingWindow(left=None, right=None) bounds nothing; use Full()")
        for side in ("left", "right"):
            distance = whole_or_none(getattr(self, side), f"SlidingWindow {side}", "no bound", minimum=0)
            object.__setattr__(self, side, distance)
        self._check_offset()

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        ahead = cols - self.place(rows, positions)
        if self.left is None:
            return ahead <= self.right
        if self.right is None:
            return ahead >= -self.left
        return (ahead >= -self.left) & (ahead <= self.right)

    def reach(self, blocks: Blocks) -> Reach:
        return between(self.places(blocks), blocks.cols, self.left, self.right)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        x = self.place(rows, positions)
        lo = 0 if self.left is None else x - self.left
        hi = kv_len if self.right is None else x + self.right + 1
        return single(lo, hi, len(rows), kv_len)


def window_tokens(n: int) -> SlidingWindow:
    """The window of the last n keys, the row's own included."""
    return SlidingWindow(left=whole(n, "window_tokens n", minimum=1) - 1, right=0)


@dataclass(frozen=True)
class Chunked(OffsetMask):
    """Key j is visible when x and j lie in the same chunk of `size`: floor(x / size) == floor(j / size).

    A row with negative x sees nothing, as no key is negative.
    """

    kind: ClassVar[str] = "chunked"
    size: int
    offset: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole(self.size, "Chunked size", minimum=1))
        self._check_offset()

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        x = self.place(rows, positions)
        if self.size & (self.size - 1) == 0:
            shift = self.size.bit_length() - 1  # an arithmetic shift rounds down, negative x too
            return (x >> shift) == (cols >> shift)
        # lax.div is one instruction but rounds -1 / size to 0; x >= 0 puts that right.
        return (_divide(x, self.size) == _divide(cols, self.size)) & (x >= 0)

    def reach(self, blocks: Blocks) -> Reach:
        # `//` rounds down in NumPy and in jnp. No key is negative, so a row at a negative x matches none.
        x, keys = (Extent(e.lo // self.size, e.hi // self.size) for e in (self.places(blocks), blocks.cols))
        one = (x.lo == x.hi) & (keys.lo == keys.hi)
        return Reach((x.lo <= keys.hi) & (keys.lo <= x.hi), one & (x.lo == keys.lo))

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        start = self.place(rows, positions) // self.size * self.size
        return single(start, start + self.size, len(rows), kv_len)


@dataclass(frozen=True)
class Prefix(StaticLeaf):
    """Keys before `length` are visible; 0 makes none visible."""

    kind: ClassVar[str] = "prefix"
    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", whole(self.length, "Prefix length", minimum=0))

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return cols < self.length

    def reach(self, blocks: Blocks) -> Reach:
        return Reach(blocks.cols.lo < self.length, blocks.cols.hi < self.length)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        return single(0, self.length, len(rows), kv_len)


def _divide(x: Any, size: int) -> Any:
    return jax.lax.div(x, jnp.full_like(x, size)) if isinstance(x, jax.Array) else x // size
