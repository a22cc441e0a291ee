"""Masks of steps over pages: causality, distances and chunks, all by a query's position in its sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from .algebra import Mask
from .causal_window import causal_window_of
from .static import Chunked

__all__ = ["ANY_PAGE_MASK", "PageMask", "page_mask"]


class PageMask(NamedTuple):
    """Whether later keys are hidden, the inclusive distances to the left and right, and the size of the chunks of positions
    outside of which keys are hidden; None without a limit."""

    causal: bool
    left: int | None
    right: int | None
    chunk: int | None

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    @property
    def most_left(self) -> int | None:
        """How far to the left any query sees, by its window and its chunk."""
        ends = [n for n in (self.left, None if self.chunk is None else self.chunk - 1) if n is not None]
        return min(ends) if ends else None


# Of a mask that isn't known to be one: no limit, as far as causality allows.
ANY_PAGE_MASK = PageMask(True, None, None, None)


def page_mask(mask: Mask) -> PageMask | None:
    """The mask as one of these, if Causal, SlidingWindow and Chunked of the queries' positions describe it fully, else None.

    Of several sizes of chunks each must divide the next: then the smallest counts.
    """
    parts = mask.conjuncts()
    sizes = sorted(part.size for part in parts if isinstance(part, Chunked) and part.offset is None)
    if any(large % small for small, large in pairwise(sizes)):
        return None
    band = causal_window_of(part for part in parts if not isinstance(part, Chunked) or part.offset is not None)
    return None if band is None else PageMask(*band, sizes[0] if sizes else None)
