"""How deep a mask is nested: counted once when it is built, and limited."""

from __future__ import annotations

from typing import TypeVar

from ..errors import MaskError
from .checks import DEEPEST

__all__ = ["leveled"]

M = TypeVar("M")


def leveled(mask: M) -> M:
    """An And, Or or Not with its number of levels. Errors: MaskError for more than can be read, described and compiled."""
    levels = 1 + max(_levels(child) for child in mask.children())  # type: ignore[attr-defined]
    if levels > DEEPEST:
        raise MaskError(
            f"the mask is nested deeper than {DEEPEST} levels; wanted fewer alternations of & and |: put all parts of an & (or "
            "|) into one"
        )
    object.__setattr__(mask, "_levels", levels)  # not a field; counted once, as a mask may be built part by part
    return mask


def _levels(mask: object) -> int:
    """The levels of a mask's tree; 1 for a leaf. jax unflattens masks without counting."""
    levels: int | None = vars(mask).get("_levels")
    if levels is None:
        return 1 + max((_levels(child) for child in mask.children()), default=0)  # type: ignore[attr-defined]
    return levels
