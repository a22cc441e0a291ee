"""Masks as causality and distances: for other libraries' flags, for kernels over pages, and for bands of keys around a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from typing_extensions import TypeIs

from .algebra import Full, Mask
from .static import Causal, SlidingWindow

__all__ = [
    "ANY_CAUSAL", "CausalWindow", "causal_window", "causal_window_of", "is_band", "key_bounds", "square_flags",
]  # fmt: skip


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
    return causal_window_of(mask.conjuncts(), offset)


def causal_window_of(parts: Iterable[Mask], offset: int | None = None) -> CausalWindow | None:
    """The intersection of masks as one of these; see `causal_window`."""
    causal, left, right = False, None, None
    for part in parts:
        if isinstance(part, Full):
            continue
        if not is_band(part) or part.offset != offset:
            return None
        if isinstance(part, Causal):
            causal = True
        else:
            left, right = _tighter(min, left, part.left), _tighter(min, right, part.right)
    return CausalWindow(causal, left, right)


def square_flags(mask: Mask, q_len: int, kv_len: int) -> tuple[bool, tuple[int, int] | None] | None:
    """(is_causal, local_window_size) in the terms of jax.nn if these say all of the mask and leave no row without a key, else
    None."""
    if isinstance(mask, Full):
        return False, None
    seen = causal_window(mask, offset=0)
    if q_len != kv_len or seen is None or not seen.causal:
        return None
    return True, None if seen.left is None else (seen.left, 0)


def is_band(part: Mask) -> TypeIs[Causal | SlidingWindow]:
    """Whether each row sees only keys that follow one another, at distances that are the same for all."""
    return isinstance(part, Causal | SlidingWindow)


def key_bounds(
    parts: Iterable[Causal | SlidingWindow],
    offset: Any,
    greater: Callable[[Any, Any], Any] = max,
    smaller: Callable[[Any, Any], Any] = min,
) -> tuple[Any, Any]:
    """(lower, upper): a row sees the keys from row + lower to row + upper; None without a bound.

    offset: of parts that have none of their own; if it is traced, `greater` and `smaller` compare traced numbers.
    """
    lower = upper = None
    for part in parts:
        at = offset if part.offset is None else part.offset
        left, right = (None, 0) if isinstance(part, Causal) else (part.left, part.right)
        lower = _tighter(greater, lower, None if left is None else at - left)
        upper = _tighter(smaller, upper, None if right is None else at + right)
    return lower, upper


def _tighter(of: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """The tighter of two bounds; None is none."""
    return second if first is None else first if second is None else of(first, second)
