"""Checks of a mask's parameters, shared by all nodes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from ..errors import MaskError, a_type, shown

__all__ = ["DEEPEST", "LIMIT", "check_distances", "is_host", "whole", "whole_or_none"]

# Positions are int32 on devices. If every declared number is within 2**30, sums and differences of an index
# and a declared number can't overflow.
LIMIT = 2**30
# Levels of a mask's tree. Each takes several of Python's stack frames, and JSON readers limit nesting, too.
DEEPEST = 64


# How a number that isn't known before the run is expressed: in arrays, whose values are not compiled in.
_TRACED_SIDE = {
    "left": "subtract it from the queries' positions, Positions(query - left, kv, left=0, right=None), and intersect that with "
    "the bound on the other side",
    "right": "add it to the queries' positions, Positions(query + right, kv), and intersect that with the bound on the other "
    "side",
}


def whole(value: Any, what: str, *, minimum: int = -LIMIT, none: str = "", traced: str = "") -> int:
    """Return `value` as an int in [minimum, 2**30]. `none` says what None would mean, and `traced` how to express a number that
    is known only at run time, for the messages."""
    expected = f"an int, or None for {none}" if none else "an int"
    if isinstance(value, (bool, np.bool_)):
        raise MaskError(f"{what}={shown(value)} is a bool; wanted {expected}: write the number")
    try:
        number = operator.index(value)
    except Exception:  # floats and strings have no index; a tracer raises jax's own error
        hint = "give the number itself"
        if isinstance(value, jax.core.Tracer):
            hint = f"it is compiled in, so it can't be traced; {traced or 'traced numbers go into Lengths, Positions or Dense'}"
        elif isinstance(value, float | np.floating) and float(value).is_integer():
            hint = f"write {shown(int(value))}"
        raise MaskError(f"{what}={shown(value)} is {a_type(value)}; wanted {expected}: {hint}") from None
    hint = f": use None for {none}" if none else ""
    if number < minimum:
        raise MaskError(f"{what}={shown(number)}; wanted an int of at least {minimum}{hint}")
    if number > LIMIT:
        raise MaskError(f"{what}={shown(number)}; wanted at most 2**30, so that int32 indices can't overflow{hint}")
    return number


def whole_or_none(value: Any, what: str, none: str, *, minimum: int = -LIMIT, traced: str = "") -> int | None:
    """The same, but None is allowed, with the meaning `none`."""
    return None if value is None else whole(value, what, minimum=minimum, none=none, traced=traced)


def check_distances(window: Any) -> None:
    """Check the inclusive distances `left` and `right` of a leaf and make them ints. One of them may be None."""
    name = type(window).__name__
    if window.left is None and window.right is None:
        raise MaskError(f"{name}(left=None, right=None) bounds nothing; use Full()")
    for side in ("left", "right"):
        hint = _TRACED_SIDE[side]
        distance = whole_or_none(getattr(window, side), f"{name} {side}", "no bound", minimum=0, traced=hint)
        object.__setattr__(window, side, distance)


def is_host(*values: Any) -> bool:
    """Whether all values are NumPy arrays, NumPy scalars or Python numbers."""
    return all(isinstance(value, (np.ndarray, np.generic, int, bool)) for value in values)
