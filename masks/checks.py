"""Checks of what a mask is built from, shared by all nodes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import MaskError

__all__ = [
    "LIMIT", "beyond_int32", "brief", "int_array", "is_host", "is_integer", "known_values", "least_and_most", "same_width", "whole",
    "whole_or_none",
]  # fmt: skip

# Positions are int32 on devices. With every declared number within 2**30, sums and differences of an index
# and a declared number can't wrap round.
LIMIT = 2**30
_INT32 = np.iinfo(np.int32)
_WITHIN_INT32 = frozenset(map(np.dtype, ("int8", "int16", "int32", "uint8", "uint16")))


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


def int_array(value: Any, what: str, dims: tuple[str, ...]) -> None:
    """Refuse anything that isn't an array of integers within int32 and of exactly these dimensions."""
    wanted = f"an integer array [{', '.join(dims)}]"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise MaskError(f"{what} is a {type(value).__name__}; wanted {wanted}: pass np.asarray({what})")
    if not is_integer(value.dtype):
        raise MaskError(f"{what} has dtype {value.dtype}; wanted {wanted}: use {what}.astype('int32')")
    if len(value.shape) != len(dims):
        mend = f"reshape it, e.g. {what}[None] for a batch of one"
        raise MaskError(f"{what} has shape {tuple(value.shape)}; wanted {wanted}: {mend}")
    reason = beyond_int32(value, what)
    if reason:
        raise MaskError(reason)


def is_integer(dtype: Any) -> bool:
    """Whether a dtype is one of whole numbers, which bools and NumPy's time spans are not."""
    return jnp.issubdtype(dtype, jnp.integer) and dtype.kind != "m"


def beyond_int32(value: Any, what: str) -> str:
    """Why an integer array may hold a number that int32 doesn't, "" where it can't: by its dtype, else by its values."""
    if value.dtype in _WITHIN_INT32 or value.dtype.itemsize < 4:
        return ""
    values, wanted = known_values(value), "wanted whole numbers that fit in int32, as on devices"
    if values is None:
        return f"{what} has dtype {value.dtype} and unknown values; {wanted}: use {what}.astype('int32')"
    found = least_and_most(values)
    wide = next((n for n in found if not _INT32.min <= n <= _INT32.max), None)
    mend = "number the ids anew, from 0" if "segment" in what else "count from the first key of the call"
    return "" if wide is None else f"{what} holds {wide}; {wanted}: {mend}"


def known_values(value: Any) -> np.ndarray | None:
    """The values of an array on the host; None for a tracer, a shape, and what lies in other processes.

    Of an array on an accelerator this waits for what computes it, and copies it.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    return np.asarray(value)


def least_and_most(values: np.ndarray) -> tuple[int, ...]:
    """The least and the largest of integers; nothing of none."""
    return (int(values.min()), int(values.max())) if values.size else ()


def is_host(*values: Any) -> bool:
    """Whether all values are NumPy arrays, NumPy scalars or Python numbers."""
    return all(isinstance(value, (np.ndarray, np.generic, int, bool)) for value in values)


def same_width(first: Any, second: Any) -> tuple[Any, Any]:
    """Bring two integer arrays to int32, in which all numbers of a mask that was checked fit.

    Explicitly, as strict dtype promotion asks for; and before subtracting, where uint8 and int8 would wrap round.
    """
    if not is_host(first, second):
        first, second = jnp.asarray(first), jnp.asarray(second)
    return first.astype(np.int32), second.astype(np.int32)
