"""causal_window: masks that other libraries' flags, and kernels over pages, express as causality and distances."""

from __future__ import annotations

from typing import NamedTuple

from .algebra import Full, Mask
from .static import Causal, SlidingWindow

__all__ = ["ANY_CAUSAL", "CausalWindow", "causal_window"]


class CausalWindow(NamedTuple):
    """Whether later keys are hidden, and the inclusive distances to the left and right; None without a limit."""

    causal: bool
    left: int | None
    right: int | None

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.left, self.right


# Of a mask that isn't known to be one: no limit, as far as causality allows.
ANY_CAUSAL = CausalWindow(True, None, None)


def causal_window(mask: Mask, offset: int | None = None) -> CausalWindow | None:
    """The mask as one of these, if Causal and SlidingWindow with this offset describe it fully, else None.

    offset: of the query's row; None counts from its position.
    """
    causal, left, right = False, None, None
    for part in mask.conjuncts():
        if isinstance(part, Full):
            continue
        if isinstance(part, Causal) and part.offset == offset:
            causal = True
        elif isinstance(part, SlidingWindow) and part.offset == offset:
            left, right = _nearer(left, part.left), _nearer(right, part.right)
        else:
            return None
    return CausalWindow(causal, left, right)


def _nearer(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)
