"""The dynamic leaves: segment ids, lengths, positions and dense arrays, all of which may be traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ..errors import MaskError, a_type
from .algebra import Mask
from .bounds import BlockBounds, Blocks, Extent, between, equal
from .checks import check_distances, is_host
from .int_arrays import same_rank, same_width
from .slots import DynamicMask, Slot

__all__ = ["Dense", "Lengths", "Positions", "SegmentIds"]


@dataclass(frozen=True, eq=False)
class SegmentIds(DynamicMask):
    """A key is visible when its id equals the query's: query int [batch, q], kv int [batch, kv]."""

    kind: ClassVar[str] = "segment_ids"
    parts = (("query", "q_segment_ids", ("batch", "q")), ("kv", "kv_segment_ids", ("batch", "kv")))
    query: Any
    kv: Any

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        self.usable()
        return self.related(self, same_width(self.query[:, None, :, None], self.kv[:, None, None, :]), cols)

    @staticmethod
    def related(leaf: Any, parts: Sequence[Any], cols: Any) -> Any:
        return parts[0] == parts[1]

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        query, kv = same_width(self.query, self.kv)
        return equal(blocks.of_rows(query), blocks.of_keys(kv))


@dataclass(frozen=True, eq=False)
class Lengths(DynamicMask):
    """Key j is visible when j < kv[b]: kv int [batch], j the global key index."""

    kind: ClassVar[str] = "kv_lengths"
    parts = (("kv", "kv_lengths", ("batch",)),)
    kv: Any

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        self.usable()
        cols, lengths = same_rank(*same_width(cols, self.kv[:, None, None, None]))
        return self.related(self, (lengths,), cols)

    @staticmethod
    def related(leaf: Any, parts: Sequence[Any], cols: Any) -> Any:
        return cols < parts[0]

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        lengths = jnp.asarray(self.kv)[:, None, None, None]
        some, every = (same_width(edge, lengths) for edge in blocks.cols)
        return BlockBounds(some[0] < some[1], every[0] < every[1])


@dataclass(frozen=True, eq=False)
class Positions(DynamicMask):
    """A key is visible when q_pos - left <= kv_pos <= q_pos + right: query int [batch, q], kv int [batch, kv].

    left and right are static inclusive distances; None means no bound.
    """

    kind: ClassVar[str] = "positions"
    parts = (("query", "q_positions", ("batch", "q")), ("kv", "kv_positions", ("batch", "kv")))
    query: Any
    kv: Any
    left: int | None = None
    right: int | None = 0

    def __post_init__(self) -> None:
        check_distances(self)
        super().__post_init__()

    def slot(self) -> Slot:
        return Slot(self.kind, left=self.left, right=self.right)

    @classmethod
    def from_slot(cls, slot: Slot, arrays: Sequence[Any]) -> Mask:
        query, kv = arrays
        return cls(query, kv, slot.left, slot.right)

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        self.usable()
        return self.related(self, same_width(self.query[:, None, :, None], self.kv[:, None, None, :]), cols)

    @staticmethod
    def related(leaf: Any, parts: Sequence[Any], cols: Any) -> Any:
        query, kv = parts
        above = None if leaf.left is None else kv >= _first(query, leaf.left)
        below = None if leaf.right is None else kv <= _last(query, leaf.right)
        return above if below is None else below if above is None else above & below

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        query, kv = same_width(self.query, self.kv)
        q, k = blocks.of_rows(query), blocks.of_keys(kv)
        lower = None if self.left is None else Extent(_first(q.lo, self.left), _first(q.hi, self.left))
        upper = None if self.right is None else Extent(_last(q.lo, self.right), _last(q.hi, self.right))
        return between(lower, k, upper)


@dataclass(frozen=True, eq=False)
class Dense(DynamicMask):
    """A key is visible where the array is True: bool, rank 4, broadcastable to [batch, heads, q, kv]."""

    kind: ClassVar[str] = "dense_mask"
    parts = (("array", "mask", ("batch", "heads", "q", "kv")),)
    array: Any

    def check(self) -> None:
        array, expected = self.array, "a bool array of rank 4, broadcastable to [batch, heads, q, kv]"
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise MaskError(f"mask is {a_type(array)}; wanted {expected}: pass np.asarray(mask)")
        if array.dtype != np.bool_:
            hint = "an additive mask goes into `bias`; for a 0/1 mask use mask.astype(bool)"
            raise MaskError(f"mask has dtype {array.dtype}; wanted {expected}, True = may attend: {hint}")
        if len(array.shape) != 4:
            hint = "mask[:, None, None, :] for a [batch, kv] padding mask, mask[None, None] for [q, kv]"
            raise MaskError(f"mask has shape {tuple(array.shape)}; wanted {expected}: use {hint}")

    def slot(self) -> Slot:
        return Slot(self.kind, broadcast=tuple(size == 1 for size in getattr(self.array, "shape", ())))

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        self.usable()
        return self.array

    @staticmethod
    def related(leaf: Any, parts: Sequence[Any], cols: Any) -> Any:
        return parts[0]

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        return blocks.of_cells(self.array)

    def _broadcasts(self, size: int) -> bool:
        return size == 1


# Bounds of the window instead of the difference of two positions: these don't overflow for any int32.


def _first(query: Any, left: int) -> Any:
    """The smallest key position within `left` of the query's."""
    smallest = np.iinfo(query.dtype).min + left
    return query if left == 0 else (np if is_host(query) else jnp).maximum(query, smallest) - left


def _last(query: Any, right: int) -> Any:
    """The largest key position within `right` of the query's."""
    largest = np.iinfo(query.dtype).max - right
    return query if right == 0 else (np if is_host(query) else jnp).minimum(query, largest) + right
