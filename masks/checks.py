"""Checks of what a mask is built from, shared by all nodes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from ..errors import MaskError

__all__ = ["LIMIT", "brief", "is_host", "whole", "whole_or_none"]

# Positions are int32 on devices. With every declared number within 2**30, sums and differences of an index
# and a declared number can't wrap round.
LIMIT = 2**30


def whole(value: Any, what: str, *, minimum: int = -LIMIT, none: str = "") -> int:
    """Return `value` as an int in [minimum, 2**30]; `none` says what None would mean, for the messages."""
    wanted = f"an int, or None for {none}" if none else "an int"
    if isinstance(value, (bool, np.bool_)):
        raise MaskError(f"{what}={value!r} is a bool; wanted {wanted}: write the number")
    try:
        number = operator.index(value)
    except Exception:  # floats and strings have no index; a tracer raises an error of jax's own
        traced = isinstance(value, jax.core.Tracer)
        mend = "traced numbers go into Lengths, Positions or Dense" if traced else f"use int({what})"
        raise MaskError(f"{what}={value!r} is a {type(value).__name__}; wanted {wanted}: {mend}") from None
    mend = f": use None for {none}" if none else ""
    if number < minimum:
        raise MaskError(f"{what}={brief(number)}; wanted an int of at least {minimum}{mend}")
    if number > LIMIT:
        raise MaskError(f"{what}={brief(number)}; wanted at most 2**30, or int32 indices wrap round{mend}")
    return number


def brief(number: int) -> str:
    """A number for a message, without thousands of digits; Python itself refuses to write more than 4300."""
    return str(number) if number.bit_length() <= 128 else f"(a number of {number.bit_length()} bits)"


def whole_or_none(value: Any, what: str, none: str, *, minimum: int = -LIMIT) -> int | None:
    """The same, where None is a value with the meaning `none`."""
    return None if value is None else whole(value, what, minimum=minimum, none=none)


def is_host(*values: Any) -> bool:
    """Whether all values are NumPy arrays, NumPy scalars or Python numbers."""
    return all(isinstance(value, (np.ndarray, np.generic, int, bool)) for value in values)
