"""Which parts of a tile a warp computes: those that its rows don't see are passed over, and those that all of them see whole have
nothing to hide.

A part is some neighbouring columns of a tile. A warp branches as one, by what it knows of all of its rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax

from .within import Span, ends_in_warp

__all__ = ["ALL_SEEN", "SeenParts", "seen_parts"]

T = TypeVar("T")
_CUT = 16  # the first of the bits for parts that some row doesn't see whole


class SeenParts(NamedTuple):
    """seen: of each part whether a row of the warp sees something of it, None if that isn't asked; cut: whether one misses some
    of it, True if that isn't asked. span: of all parts' columns. None if all rows see all columns."""

    seen: tuple[Any, ...] | None
    cut: tuple[Any, ...] | None
    span: Span | None = None

    @property
    def everything(self) -> bool:
        """Whether it's known that all rows see all columns."""
        return self.cut is None

    def of_part(self, part: int, width: int) -> Span | None:
        """The span of a part's columns, each of so many."""
        return None if self.span is None else self.span.counted_from(part * width)

    def where_seen(self, part: int, work: Callable[[], T], instead: Callable[[], T]) -> T:
        """work() if a row of the warp sees something of a part, else instead()."""
        return work() if self.seen is None else lax.cond(self.seen[part], work, instead)

    def where_cut(self, part: int, work: Callable[[], T], instead: Callable[[], T]) -> T:
        """work() if a row of the warp doesn't see all of a part, else instead()."""
        if self.cut is None:
            return instead()
        return work() if self.cut[part] is True else lax.cond(self.cut[part], work, instead)


ALL_SEEN = SeenParts(None, None)


def seen_parts(span: Span, width: int, count: int, layout: Any, *, interpret: bool) -> SeenParts:
    """Of a tile with `count` parts of `width` columns, a power of two. layout: of the tile's numbers. Between its rows' spans a
    warp is taken to see all columns."""
    begins, ends = (
        None if x is None else ends_in_warp(x, layout.reduce(1), interpret=interpret) for x in (span.begin, span.end)
    )
    if count == 1:
        sees = [*([begins[0] < width] if begins else []), *([ends[1] > 0] if ends else [])]
        cuts = [*([begins[1] > 0] if begins else []), *([ends[0] < width] if ends else [])]
        return SeenParts((functools.reduce(operator.and_, sees),), (functools.reduce(operator.or_, cuts),), span)
    seen = whole = every = jnp.int32((1 << count) - 1)
    shift = width.bit_length() - 1

    def before(column: Any) -> Any:
        """The parts that end at a column or before it."""
        return (jnp.int32(1) << jnp.clip(column >> shift, 0, count)) - 1

    if ends is not None:
        seen, whole = before(ends[1] + (width - 1)), before(ends[0])
    if begins is not None:
        seen, whole = seen & ~before(begins[0]), whole & ~before(begins[1] + (width - 1))
    word = seen | ((every ^ whole) << _CUT)
    some, cut = (tuple((word & (1 << first + part)) != 0 for part in range(count)) for first in (0, _CUT))
    return SeenParts(some, cut, span)
