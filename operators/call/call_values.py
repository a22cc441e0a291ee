"""What is checked in a call's values, every time: integers fit in int32, lengths in the cache, offsets within 2**30.

Everything else in a call is checked by shape and dtype, once for all similar calls. These checks read values that
the host has: NumPy's, and those of jax on CPU devices. For an accelerator's arrays they would wait for the device at every call.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import numpy as np
from jax.sharding import get_abstract_mesh

from ...errors import InputError, InputTypeError
from ...masks import Mask
from ...masks.checks import LIMIT
from ...masks.int_arrays import beyond_int32, is_integer, known_values, min_and_max
from ...sharding import OperandTable
from ...symbolic import surely
from .arrays import Arrays, is_array
from .options import Options

__all__ = ["at_hand", "check_lengths", "check_offsets", "checked_values"]

_INT32 = np.dtype(np.int32)


def checked_values(arrays: Arrays, options: Options, table: OperandTable) -> Arrays:
    """Return the arrays of a call, or their shapes, with known 64-bit integers and unsigned 32-bit ones as int32.

    Anything that isn't an integer array is left to `describe`. Errors: InputTypeError for such integers whose values aren't
    known; InputError for invalid values.
    """
    changed: dict[str, Any] = {}
    for name, array in arrays.by_name.items():
        if name in table and table[name].dtype == "integers":
            checked = _checked(name, array, arrays, options)
            if checked is not array:
                changed[name] = checked
    arrays = arrays.changed(**changed) if changed else arrays
    if arrays.mask_leaves and options.mask is not None:
        named = zip(_leaf_names(options.mask), arrays.mask_leaves, strict=True)
        leaves = tuple(_checked(name, x, arrays, options) for name, x in named)
        if any(new is not old for new, old in zip(leaves, arrays.mask_leaves, strict=True)):
            return arrays._replace(mask_leaves=leaves)
    return arrays


def check_lengths(name: str, lengths: np.ndarray, kv_len: int) -> None:
    """Refuse cache lengths below 0 or above the cache's length. Errors: InputError."""
    for number in min_and_max(lengths):
        beyond = surely(functools.partial(operator.gt, number, kv_len))  # a symbolic length may be long enough
        if number < 0 or (beyond and not _is_part()):
            raise InputError(
                f"{name} holds {number}; wanted 0 to {kv_len}, the number of keys in the call: count the keys of each row that "
                "are written."
            )


def check_offsets(name: str, offsets: np.ndarray) -> None:
    """Refuse offsets beyond 2**30, with which positions would overflow. Errors: InputError."""
    for number in min_and_max(offsets):
        if not -LIMIT <= number <= LIMIT:
            raise InputError(
                f"{name} holds {number}; wanted at most 2**30 either way, or int32 positions overflow: count positions from "
                "the first key of the call."
            )


def _checked(name: str, x: Any, arrays: Arrays, options: Options) -> Any:
    """One array, as int32 if its dtype is wider."""
    if getattr(x, "dtype", None) != _INT32:
        if not is_array(x) or not is_integer(x.dtype):
            return x
        x = _narrowed(name, x)
    if not name.startswith(("kv_lengths", "kv_starts", "query_offset")):
        return x
    values = at_hand(x)
    if values is None:
        return x
    if name == "query_offset":
        check_offsets(name, values)
        return x
    key, at = arrays.key, options.layout.find("t")
    if is_array(key) and len(key.shape) == len(options.layout) and at >= 0:
        check_lengths(name, values, key.shape[at])
    return x


def _narrowed(name: str, x: Any) -> Any:
    reason = beyond_int32(x, name)
    if reason:
        raise (InputTypeError if known_values(x) is None else InputError)(f"{reason}.")
    # NumPy's integers are accepted in any byte order; jax has only one.
    return x.astype(np.int32) if x.dtype.itemsize > 2 else x


def at_hand(x: Any) -> np.ndarray | None:
    """Values that can be read without a transfer."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    devices: Any = x.sharding.device_set
    return known_values(x) if all(device.platform == "cpu" for device in devices) else None


def _is_part() -> bool:
    """Whether the keys of a call may be only a part of those that lengths count, as inside the caller's own shard_map."""
    return bool(get_abstract_mesh().manual_axes)


@functools.lru_cache(maxsize=512)
def _leaf_names(structure: Mask) -> tuple[str, ...]:
    return tuple(leaf.name for leaf in structure.split()[1])
