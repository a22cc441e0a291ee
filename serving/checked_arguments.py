"""Checks of a pool's arguments: counts and token ids."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable
from typing import Any

from ..errors import InputError, InputTypeError, a_type, shown

__all__ = ["token_array", "whole_number"]


def whole_number(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """An integer of Python or NumPy from `minimum` to `maximum`. Errors: InputTypeError, InputError."""
    if isinstance(value, bool):
        raise InputTypeError(f"{name} is a bool; wanted an integer.")
    try:
        number = operator.index(value)
    except TypeError:
        raise InputTypeError(f"{name}={shown(value)} is {a_type(value)}; wanted an integer.") from None
    if number < minimum or (maximum is not None and number > maximum):
        expected = f"{minimum} or more" if maximum is None else f"one of {minimum} to {maximum}"
        raise InputError(f"{name}={shown(number)}; wanted {expected}.")
    return number


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Token ids as 64-bit integers, from any iterable of integers. Errors: InputTypeError, InputError."""
    if isinstance(token_ids, str | bytes | bytearray | memoryview | dict):
        raise InputTypeError(f"token_ids is {a_type(token_ids)}; wanted integers, such as a tokenizer's ids.")
    try:  # tolist() is one step; iterating over a jax array takes seconds
        return array("q", token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids)
    except OverflowError:
        raise InputError(f"token_ids={shown(token_ids)}; wanted 64-bit integers.") from None
    except TypeError:
        raise InputTypeError(
            f"token_ids={shown(token_ids)} is {a_type(token_ids)}; wanted integers in one dimension. "
            "Hint: for one token give [token]; for tokens whose ids aren't known use append_count."
        ) from None
