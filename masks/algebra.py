"""The algebra: Mask, Full, And, Or and Not. `&`, `|` and `~` build masks in a normal form.

Equal declarations compare equal: And and Or are flat and have at least two masks. And drops Full, and Or with a Full is
Full. An empty And is Full, and an empty Or is ~Full. ~~m is m.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import MaskError, a_type
from .blocks import Grid, has_dead_rows, live_blocks, live_blocks_by_head
from .bounds import BlockBounds, Blocks
from .checks import LIMIT, whole
from .draw import Drawn
from .heads import check_batches, with_equal_heads
from .int_arrays import same_rank
from .intervals import Intervals, complement, intersect, single, unite
from .levels import leveled
from .materialise import materialise

__all__ = ["And", "Full", "Mask", "Not", "Or", "raw"]


class Mask(Drawn["Mask"]):
    """Which query may attend to which key. Combine masks with `&`, `|` and `~`. True means that the query may see the key.

    Row i and key j are global indices, and `position = i + query_offset`. A leaf with `offset=None` uses
    the position; a leaf with an explicit offset uses `i + offset`.
    """

    # Makes `numpy_array & mask` call __rand__ instead of creating an array of objects.
    __array_ufunc__ = None
    # How pydantic reads and writes a mask: set by pydantic_field.py.
    __get_pydantic_core_schema__: ClassVar[Any]
    __pydantic_serializer__: ClassVar[Any]

    def __and__(self, other: Any) -> Mask:
        return And((self, other))

    def __or__(self, other: Any) -> Mask:
        return Or((self, other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __rand__(self, other: Any) -> Mask:
        return And((other, self))

    def __ror__(self, other: Any) -> Mask:
        return Or((other, self))

    def __bool__(self) -> NoReturn:
        raise MaskError("a mask has no truth value; use & | ~ for `and` `or` `not`, or `mask is not None`")

    def __str__(self) -> str:
        return self.describe()

    def bounds(self) -> tuple[Mask, Mask]:
        """Static masks (lower, upper) with lower ⊆ self ⊆ upper for any values of the dynamic leaves. For a static mask both
        are the mask."""
        return self, self

    def split_static(self) -> tuple[Mask, tuple[Mask, ...]]:
        """(the And of the conjuncts without dynamic leaves, the other conjuncts)."""
        parts = self.conjuncts()
        return And([m for m in parts if m.is_static]), tuple(m for m in parts if not m.is_static)

    def materialise(self, q_slice: slice, kv_slice: slice, *, query_offset: Any = 0) -> Any:
        """Evaluate the mask for global half-open slices: bool [batch | 1, heads | 1, q, kv], True where visible.

        query_offset: int, or integer array [batch]. Returns a NumPy array unless the arrays or the offset are jax's.
        """
        shape = getattr(query_offset, "shape", ())
        check_batches(self, shape[0] if shape else 1)
        return materialise(with_equal_heads(self), q_slice, kv_slice, query_offset)

    def row_intervals(self, rows: ArrayLike, kv_len: int, *, query_offset: int = 0) -> Intervals | None:
        """The visible keys of each row as (lo, hi), int64 [K, rows], K >= 1; None if only a test of each cell can tell.

        Half-open, within [0, kv_len), sorted along K, disjoint and not adjacent. Unused intervals come last, as
        lo == hi == kv_len. Exact for static masks without MaskFunction.
        """
        rows = np.asarray(rows, np.int64)
        return self.intervals(rows, rows + whole(query_offset, "query_offset"), kv_len)

    def live_blocks(
        self,
        block_q: int,
        block_kv: int,
        *,
        q_len: int,
        kv_len: int,
        q_start: int = 0,
        query_offset: int = 0,
        k_start: int = 0,
    ) -> NDArray[np.int8]:
        """0 dead, 1 partial, 2 full for each block: int8 [ceil(q_len / block_q), ceil(kv_len / block_kv)].

        Rows are q_start..q_start+q_len, keys k_start..k_start+kv_len; cells beyond their ends don't count.
        Exact for static masks. With dynamic leaves, dead and full are certain, and everything else is partial. If heads see
        different blocks, a block is dead or full only if it is so for all heads.
        """
        grid = Grid(block_q, block_kv, q_len, kv_len, q_start, query_offset, k_start)
        return live_blocks(*with_equal_heads(self).bounds(), grid)

    def live_blocks_by_head(self, block_q: int, block_kv: int, **place: int) -> NDArray[np.int8]:
        """`live_blocks` of each head: int8 [heads | 1, q blocks, kv blocks], 1 if all heads are alike."""
        return live_blocks_by_head(*with_equal_heads(self).bounds(), Grid.of(block_q, block_kv, **place))

    def may_have_dead_rows(self, q_len: int, kv_len: int, *, q_start: int = 0, query_offset: int = 0) -> bool:
        """Whether a row of q_start..q_start+q_len sees no key. With dynamic leaves: whether that may happen."""
        grid = Grid(1, LIMIT, q_len, kv_len, q_start, query_offset)
        return has_dead_rows(with_equal_heads(self).bounds()[0], grid)


@dataclass(frozen=True)
class Full(Mask):
    """Every key is visible."""

    kind: ClassVar[str] = "full"

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return (rows - rows) == (cols - cols)

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        seen = self.test(blocks.rows.lo, None, blocks.cols.lo)
        return BlockBounds(seen, seen)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals:
        return single(0, kv_len, len(rows), kv_len)

    def conjuncts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True, init=False)
class _Several(Mask):
    """Base class of And and Or, which join the answers of their masks."""

    join: ClassVar[Any]  # joins two tests, or two block bounds
    join_intervals: ClassVar[Any]
    masks: tuple[Mask, ...]

    # __new__ instead of __init__, because the normal form may be a node of another class.
    def __new__(cls, masks: Iterable[Mask]) -> Mask:  # type: ignore[misc]
        flat = cls.flat(_masks(masks, cls.__name__))
        return flat[0] if len(flat) == 1 else leveled(raw(cls, masks=tuple(flat)))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.masks,)

    @staticmethod
    def flat(masks: Sequence[Mask]) -> Sequence[Mask]:
        """The masks in normal form; at least one."""
        raise NotImplementedError

    def children(self) -> tuple[Mask, ...]:
        return self.masks

    def with_children(self, children: Sequence[Mask]) -> Mask:
        return type(self)(children)

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return functools.reduce(self.join, same_rank(*(m.test(rows, positions, cols) for m in self.masks)))

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        return functools.reduce(self.join, (m.block_bounds(blocks) for m in self.masks))

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        sets = [m.intervals(rows, positions, kv_len) for m in self.masks]
        return None if any(part is None for part in sets) else self.join_intervals(sets, kv_len)

    def bounds(self) -> tuple[Mask, Mask]:
        if self.is_static:
            return self, self
        lower, upper = zip(*(m.bounds() for m in self.masks), strict=True)
        return type(self)(lower), type(self)(upper)

    def describe(self) -> str:
        return f" {self.label} ".join(_term(m) for m in self.masks)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "masks": [m.to_dict() for m in self.masks]}


@dataclass(frozen=True, init=False)
class And(_Several):
    """Visible where every mask is."""

    kind: ClassVar[str] = "and"
    label: ClassVar[str] = "&"
    join = operator.and_
    join_intervals = staticmethod(intersect)

    @staticmethod
    def flat(masks: Sequence[Mask]) -> Sequence[Mask]:
        return [part for mask in masks for part in mask.conjuncts()] or [Full()]

    def conjuncts(self) -> tuple[Mask, ...]:
        return self.masks


@dataclass(frozen=True, init=False)
class Or(_Several):
    """Visible where any mask is."""

    kind: ClassVar[str] = "or"
    label: ClassVar[str] = "|"
    join = operator.or_
    join_intervals = staticmethod(unite)

    @staticmethod
    def flat(masks: Sequence[Mask]) -> Sequence[Mask]:
        parts = [part for mask in masks for part in (mask.masks if isinstance(mask, Or) else (mask,))]
        return [Full()] if any(isinstance(part, Full) for part in parts) else parts or [Not(Full())]


@dataclass(frozen=True, init=False)
class Not(Mask):
    """Visible where the mask is not."""

    kind: ClassVar[str] = "not"
    mask: Mask

    def __new__(cls, mask: Mask) -> Mask:  # type: ignore[misc]
        (mask,) = _masks((mask,), "Not")
        return mask.mask if isinstance(mask, Not) else leveled(raw(cls, mask=mask))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.mask,)

    def children(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def with_children(self, children: Sequence[Mask]) -> Mask:
        return Not(children[0])

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        seen = self.mask.test(rows, positions, cols)
        return not seen if isinstance(seen, bool) else ~seen  # ~True is -2

    def block_bounds(self, blocks: Blocks) -> BlockBounds:
        return ~self.mask.block_bounds(blocks)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        inner = self.mask.intervals(rows, positions, kv_len)
        return None if inner is None else complement(inner, kv_len)

    def bounds(self) -> tuple[Mask, Mask]:
        if self.is_static:
            return self, self
        lower, upper = self.mask.bounds()
        return Not(upper), Not(lower)

    @property
    def _starts(self) -> bool:
        """Whether this is what the argument kv_starts means: keys that aren't below a length."""
        return self.mask.kind == "kv_lengths"

    def part_names(self) -> tuple[str, ...]:
        return ("kv_starts",) if self._starts else self.mask.part_names()

    def describe(self) -> str:
        return "kv_starts" if self._starts else f"~{_term(self.mask)}"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "mask": self.mask.to_dict()}


def raw(cls: type[Any], **fields: Any) -> Any:
    """Create a mask with these fields, without checks and without normalising."""
    mask = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(mask, name, value)
    return mask


def _masks(masks: Iterable[Any], owner: str) -> list[Mask]:
    if isinstance(masks, Mask):
        raise MaskError(f"{owner} got one {type(masks).__name__}; wanted a tuple of masks: write a & b, a | b")
    if not isinstance(masks, Iterable) or isinstance(masks, str | bytes | Mapping) or getattr(masks, "ndim", 1) == 0:
        raise MaskError(f"{owner} got {a_type(masks)}; wanted a tuple of masks: write a & b, a | b")
    operands = list(masks)
    for mask in operands:
        if not isinstance(mask, Mask):
            hint = "wrap a boolean array in Dense(array) of shape [batch, heads, q, kv]"
            raise MaskError(f"a mask combines with masks only, not with {a_type(mask)}; {hint}")
    return operands


def _term(mask: Mask) -> str:
    return f"({mask.describe()})" if isinstance(mask, _Several) else mask.describe()
