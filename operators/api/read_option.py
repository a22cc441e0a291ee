"""Reads the static arguments of a call: numbers, flags, names and windows."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from ...errors import InputError, InputTypeError, a_type, shown
from ...symbolic import is_symbolic
from ..call.arrays import is_array

__all__ = ["read_flag", "read_integer", "read_name", "read_number", "read_window"]

# How to get the effect of an array in place of each number.
_AS_ARRAYS = {
    name: f"multiply the query by the array, [heads, 1] in layout bthd for a scale of each head, and pass {name}=1.0"
    for name in ("scale", "softmax_scale")
} | {"logits_soft_cap": "a cap can't be traced or differ between heads"}
_STATIC = "make it a static argument of your own function"


def read_number(name: str, value: Any) -> float | None:
    """A Python number. Errors: InputTypeError, InputError."""
    if value is None or type(value) is float:
        return value
    if is_array(value):
        raise InputTypeError(
            f"{name} is an array; wanted a Python number, which is compiled in: {_AS_ARRAYS.get(name, _STATIC)}."
        )
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise InputTypeError(f"{name}={shown(value)}; wanted a number.")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name}={shown(value)}; wanted a number that fits in a float.") from None


def read_integer(name: str, value: Any) -> int | None:
    if value is None or type(value) is int or is_symbolic(value):
        return value
    try:
        return operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        raise InputTypeError(f"{name}={shown(value)}; wanted an integer or an integer array [batch].") from None


def read_flag(name: str, value: Any, *, optional: bool = False) -> Any:
    """True, False or, if `optional`, None. Errors: InputTypeError."""
    if value is True or value is False or (value is None and optional):
        return value
    if not isinstance(value, np.bool_):
        raise InputTypeError(f"{name} is {shown(value)}; wanted True or False" + (" or None." if optional else "."))
    return bool(value)


def read_name(name: str, value: Any, *, optional: bool = False) -> Any:
    if isinstance(value, str) or (value is None and optional):
        return value
    raise InputTypeError(f"{name} is {a_type(value)}; wanted a string" + (" or None." if optional else "."))


def read_window(name: str, value: Any) -> tuple[int | None, int | None] | None:
    """The window; an integer n means (n, n), as in jax.nn.dot_product_attention's local_window_size."""
    if value is None:
        return None
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise InputError(f"{name}={shown(value)}; wanted an integer or (left, right) inclusive distances.")
    if any(isinstance(side, jax.core.Tracer) for side in sides):
        raise InputTypeError(
            f"{name} is traced; wanted numbers, which are compiled in: for a window that is known only at run time use a mask "
            "instead, Causal() & Positions(query - left, kv, left=0, right=None), with the positions of queries and keys as "
            "integers [batch, length]; to choose between a few windows, call with each in a branch of jax.lax.cond or switch."
        )
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer)):
            raise InputTypeError(f"{name}={shown(value)}; wanted an integer or (left, right) inclusive distances.")
    if any(side is not None and side < 0 for side in sides):
        raise InputError(f"{name}={shown(value)}; wanted distances of 0 or more, None for no limit.")
    left, right = sides
    return left if left is None else int(left), right if right is None else int(right)
