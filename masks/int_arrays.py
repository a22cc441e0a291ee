"""Arrays of ids, lengths, positions and offsets: integers that fit in int32, the type of indices on devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import MaskError
from .checks import is_host

__all__ = ["beyond_int32", "int_array", "is_integer", "known_values", "min_and_max", "same_rank", "same_width"]

_INT32 = np.iinfo(np.int32)
_WITHIN_INT32 = frozenset(map(np.dtype, ("int8", "int16", "int32", "uint8", "uint16")))


def int_array(value: Any, what: str, dims: tuple[str, ...]) -> None:
    """Check that a value is an integer array with values within int32 and exactly these dimensions."""
    expected = f"an integer array [{', '.join(dims)}]"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise MaskError(f"{what} is a {type(value).__name__}; wanted {expected}: pass np.asarray({what})")
    if not is_integer(value.dtype):
        raise MaskError(f"{what} has dtype {value.dtype}; wanted {expected}: use {what}.astype('int32')")
    if len(value.shape) != len(dims):
        hint = f"reshape it, e.g. {what}[None] for a batch of one"
        raise MaskError(f"{what} has shape {tuple(value.shape)}; wanted {expected}: {hint}")
    reason = beyond_int32(value, what)
    if reason:
        raise MaskError(reason)


def is_integer(dtype: Any) -> bool:
    """Whether a dtype is an integer dtype; bool and NumPy's timedelta are not."""
    return jnp.issubdtype(dtype, jnp.integer) and dtype.kind != "m"


def beyond_int32(value: Any, what: str) -> str:
    """Why an integer array may hold a number beyond int32, judged by its dtype or else by its values; "" if it can't."""
    if value.dtype in _WITHIN_INT32 or value.dtype.itemsize < 4:
        return ""
    values, expected = known_values(value), "wanted integers that fit in int32, the type of indices on devices"
    if values is None:
        return f"{what} has dtype {value.dtype} and unknown values; {expected}: use {what}.astype('int32')"
    extremes = min_and_max(values)
    wide = next((n for n in extremes if not _INT32.min <= n <= _INT32.max), None)
    hint = "renumber the ids from 0" if "segment" in what else "count from the first key of the call"
    return "" if wide is None else f"{what} holds {wide}; {expected}: {hint}"


def known_values(value: Any) -> np.ndarray | None:
    """The values of an array on the host; None for a tracer, a shape, or an array with parts in other processes.

    For an array on an accelerator this waits for its computation and copies it.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    return np.asarray(value)


def min_and_max(values: np.ndarray) -> tuple[int, ...]:
    """The smallest and the largest value; empty for an empty array."""
    return (int(values.min()), int(values.max())) if values.size else ()


def same_rank(*arrays: Any) -> tuple[Any, ...]:
    """The arrays with leading axes of size 1, so that all have one rank; numbers stay as they are.

    The axes are explicit because jax_numpy_rank_promotion="raise" requires that.
    """
    rank = max(map(np.ndim, arrays))
    return tuple(x if np.ndim(x) in (0, rank) else x.reshape((1,) * (rank - np.ndim(x)) + x.shape) for x in arrays)


def same_width(first: Any, second: Any) -> tuple[Any, Any]:
    """Cast two integer arrays to int32, which holds all numbers of a checked mask.

    The cast is explicit because strict dtype promotion requires that, and comes before subtraction because uint8 and int8 would
    overflow.
    """
    if not is_host(first, second):
        first, second = jnp.asarray(first), jnp.asarray(second)
    return first.astype(np.int32), second.astype(np.int32)
