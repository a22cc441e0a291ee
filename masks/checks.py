"""Checks of what a mask is built from, shared by all nodes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import MaskError, a_type, shown

__all__ = ["LIMIT", "int_array", "is_host", "same_width", "whole", "whole_or_none"]

# Positions are int32 on devices. With every declared number within 2**30, sums and differences of an index
# and a declared number can't wrap round.
LIMIT = 2**30


def whole(value: Any, what: str, *, minimum: int = -LIMIT, none: str = "") -> int:
    """Return `value` as an int in [minimum, 2**30]; `none` says what None would mean, for the messages."""
    wanted = f"an int, or None for {none}" if none else "an int"
    if isinstance(value, (bool, np.bool_)):
        raise MaskError(f"{what}={shown(value)} is a bool; wanted {wanted}: write the number")
    try:
        number = operator.index(value)
    except Exception:  # floats and strings have no index; a tracer raises an error of jax's own
        mend = "give the number itself"
        if isinstance(value, jax.core.Tracer):
            mend = "traced numbers go into Lengths, Positions or Dense"
        elif isinstance(value, float | np.floating) and float(value).is_integer():
            mend = f"write {shown(int(value))}"
        raise MaskError(f"{what}={shown(value)} is {a_type(value)}; wanted {wanted}: {mend}") from None
    mend = f": use None for {none}" if none else ""
    if number < minimum:
        raise MaskError(f"{what}={shown(number)}; wanted an int of at least {minimum}{mend}")
    if number > LIMIT:
        raise MaskError(f"{what}={shown(number)}; wanted at most 2**30, or int32 indices wrap round{mend}")
    return number


def whole_or_none(value: Any, what: str, none: str, *, minimum: int = -LIMIT) -> int | None:
    """The same, where None is a value with the meaning `none`."""
    return None if value is None else whole(value, what, minimum=minimum, none=none)


def int_array(value: Any, what: str, dims: tuple[str, ...]) -> None:
    """Refuse anything that isn't a signed (or short unsigned) integer array of exactly these dimensions."""
    wanted = f"an integer array [{', '.join(dims)}]"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise MaskError(f"{what} is {a_type(value)}; wanted {wanted}: pass np.asarray({what})")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise MaskError(f"{what} has dtype {value.dtype}; wanted {wanted}: use {what}.astype('int32')")
    if value.dtype in (np.dtype("uint32"), np.dtype("uint64")):
        # No integer type holds both these and int32 indices while jax has 64 bits off.
        raise MaskError(f"{what} has dtype {value.dtype}; wanted it signed: use {what}.astype('int32')")
    if len(value.shape) != len(dims):
        mend = f"reshape it, e.g. {what}[None] for a batch of one"
        raise MaskError(f"{what} has shape {tuple(value.shape)}; wanted {wanted}: {mend}")


def is_host(*values: Any) -> bool:
    """Whether all values are NumPy arrays, NumPy scalars or Python numbers."""
    return all(isinstance(value, (np.ndarray, np.generic, int, bool)) for value in values)


def same_width(first: Any, second: Any) -> tuple[Any, Any]:
    """Bring two integer arrays to one dtype, int32 or wider.

    Explicitly, as strict dtype promotion asks for; and before subtracting, where uint8 and int8 would wrap round.
    """
    if not is_host(first, second):
        first, second = jnp.asarray(first), jnp.asarray(second)
    # NumPy's rule: jnp's own promotion refuses under strict, even when asked.
    dtype = np.result_type(first.dtype, second.dtype, np.int32)
    return first.astype(dtype), second.astype(dtype)
