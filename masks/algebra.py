"""And, Or, Not: they put themselves in a normal form, so that equal declarations compare equal.

And and Or are flat and of at least two masks. And drops Full, Or becomes Full if one is; And of nothing is
Full and Or of nothing is ~Full. ~~m is m.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from ..errors import MaskError, a_type
from .base import Mask
from .intervals import Intervals, complement, intersect, unite
from .reach import Blocks, Reach
from .static import Full

__all__ = ["And", "Not", "Or"]


# __new__ instead of __init__, because the normal form may be a node of another class.
@dataclass(frozen=True, init=False)
class And(Mask):
    """Visible where every mask says so."""

    kind: ClassVar[str] = "and"
    masks: tuple[Mask, ...]

    def __new__(cls, masks: Iterable[Mask]) -> Mask:  # type: ignore[misc]
        flat = [part for mask in _masks(masks, "And") for part in mask.conjuncts()]
        if len(flat) < 2:
            return flat[0] if flat else Full()
        return _node(cls, tuple(flat))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.masks,)

    def children(self) -> tuple[Mask, ...]:
        return self.masks

    def conjuncts(self) -> tuple[Mask, ...]:
        return self.masks

    def with_children(self, children: Sequence[Mask]) -> Mask:
        return And(children)

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return functools.reduce(operator.and_, (m.test(rows, positions, cols) for m in self.masks))

    def reach(self, blocks: Blocks) -> Reach:
        some, every = zip(*(m.reach(blocks) for m in self.masks), strict=True)
        return Reach(functools.reduce(operator.and_, some), functools.reduce(operator.and_, every))

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        sets = _interval_sets(self.masks, rows, positions, kv_len)
        return None if sets is None else functools.reduce(lambda a, b: intersect(a, b, kv_len), sets)

    def bounds(self) -> tuple[Mask, Mask]:
        pairs = [m.bounds() for m in self.masks]
        return And([lower for lower, _ in pairs]), And([upper for _, upper in pairs])

    def describe(self) -> str:
        return " & ".join(_term(m) for m in self.masks)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "and", "masks": [m.to_dict() for m in self.masks]}


@dataclass(frozen=True, init=False)
class Or(Mask):
    """Visible where some mask says so."""

    kind: ClassVar[str] = "or"
    masks: tuple[Mask, ...]

    def __new__(cls, masks: Iterable[Mask]) -> Mask:  # type: ignore[misc]
        flat = [p for mask in _masks(masks, "Or") for p in (mask.masks if isinstance(mask, Or) else (mask,))]
        if any(isinstance(mask, Full) for mask in flat):
            return Full()
        if len(flat) < 2:
            return flat[0] if flat else Not(Full())
        return _node(cls, tuple(flat))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.masks,)

    def children(self) -> tuple[Mask, ...]:
        return self.masks

    def with_children(self, children: Sequence[Mask]) -> Mask:
        return Or(children)

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        return functools.reduce(operator.or_, (m.test(rows, positions, cols) for m in self.masks))

    def reach(self, blocks: Blocks) -> Reach:
        some, every = zip(*(m.reach(blocks) for m in self.masks), strict=True)
        return Reach(functools.reduce(operator.or_, some), functools.reduce(operator.or_, every))

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        sets = _interval_sets(self.masks, rows, positions, kv_len)
        return None if sets is None else unite(sets, kv_len)

    def bounds(self) -> tuple[Mask, Mask]:
        pairs = [m.bounds() for m in self.masks]
        return Or([lower for lower, _ in pairs]), Or([upper for _, upper in pairs])

    def describe(self) -> str:
        return " | ".join(_term(m) for m in self.masks)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "or", "masks": [m.to_dict() for m in self.masks]}


@dataclass(frozen=True, init=False)
class Not(Mask):
    """Visible where the mask says no."""

    kind: ClassVar[str] = "not"
    mask: Mask

    def __new__(cls, mask: Mask) -> Mask:  # type: ignore[misc]
        (mask,) = _masks((mask,), "Not")
        return mask.mask if isinstance(mask, Not) else _node(cls, mask)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.mask,)

    def children(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def with_children(self, children: Sequence[Mask]) -> Mask:
        return Not(children[0])

    def test(self, rows: Any, positions: Any, cols: Any) -> Any:
        seen = self.mask.test(rows, positions, cols)
        return not seen if isinstance(seen, bool) else ~seen  # ~True is -2

    def reach(self, blocks: Blocks) -> Reach:
        some, every = self.mask.reach(blocks)
        return Reach(~every, ~some)

    def intervals(self, rows: NDArray[Any], positions: NDArray[Any], kv_len: int) -> Intervals | None:
        inner = self.mask.intervals(rows, positions, kv_len)
        return None if inner is None else complement(inner, kv_len)

    def bounds(self) -> tuple[Mask, Mask]:
        lower, upper = self.mask.bounds()
        return Not(upper), Not(lower)

    def describe(self) -> str:
        return f"~{_term(self.mask)}"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "not", "mask": self.mask.to_dict()}


def _node(cls: type[Mask], value: Any) -> Mask:
    node = object.__new__(cls)
    object.__setattr__(node, "mask" if cls is Not else "masks", value)
    return node


def _masks(masks: Iterable[Any], owner: str) -> list[Mask]:
    if isinstance(masks, Mask):
        raise MaskError(f"{owner} got one {type(masks).__name__}; wanted a tuple of masks: write a & b, a | b")
    if not isinstance(masks, Iterable) or isinstance(masks, str | bytes | Mapping) or getattr(masks, "ndim", 1) == 0:
        raise MaskError(f"{owner} got {a_type(masks)}; wanted a tuple of masks: write a & b, a | b")
    found = list(masks)
    for mask in found:
        if not isinstance(mask, Mask):
            got, mend = a_type(mask), "wrap a boolean array in Dense(array)"
            raise MaskError(f"{owner} got {got}; wanted masks: {mend} of shape [batch, heads, q, kv]")
    return found


def _term(mask: Mask) -> str:
    return f"({mask.describe()})" if isinstance(mask, (And, Or)) else mask.describe()


def _interval_sets(
    masks: tuple[Mask, ...], rows: NDArray[Any], positions: NDArray[Any], kv_len: int
) -> list[Intervals] | None:
    sets: list[Intervals] = []
    for mask in masks:
        found = mask.intervals(rows, positions, kv_len)
        if found is None:
            return None
        sets.append(found)
    return sets
