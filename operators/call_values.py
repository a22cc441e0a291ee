"""What is checked of a call's values, every time: integers fit in int32, lengths in the cache, offsets within 2**30.

Everything else of a call is checked by shape and dtype, once for all calls that are alike. These checks look at values that
the host has: NumPy's, and those of jax on CPU devices. Of an accelerator's arrays they'd wait for the device at every call.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import get_abstract_mesh

from ..errors import InputError, InputTypeError
from ..masks import Mask
from ..masks.checks import LIMIT
from ..masks.int_arrays import beyond_int32, is_integer, known_values, least_and_most
from .arguments import Arrays, Options, is_array

__all__ = ["at_hand", "check_lengths", "check_offsets", "checked_values"]

_NAMES = ("q_segment_ids", "kv_segment_ids", "kv_lengths", "kv_starts", "query_offset")
_INT32 = np.dtype(np.int32)


def checked_values(arrays: Arrays, options: Options) -> Arrays:
    """Return the arrays of a call, or their shapes, with known integers of 64 bits, or unsigned ones of 32, as int32.

    What isn't an array of integers is left to `describe`. Errors: InputTypeError for such integers whose values aren't known;
    InputError for values that mean nothing.
    """
    changed: dict[str, Any] = {}
    for name in _NAMES:
        given = getattr(arrays, name)
        if given is not None:
            found = _checked(name, given, arrays, options)
            if found is not given:
                changed[name] = found
    if arrays.mask_leaves and options.mask is not None:
        named = zip(_leaf_names(options.mask), arrays.mask_leaves, strict=True)
        leaves = tuple(_checked(name, x, arrays, options) for name, x in named)
        if any(new is not old for new, old in zip(leaves, arrays.mask_leaves, strict=True)):
            changed["mask_leaves"] = leaves
    return arrays._replace(**changed) if changed else arrays


def check_lengths(name: str, lengths: np.ndarray, kv_len: int) -> None:
    """Refuse lengths of a cache below 0 or above it. Errors: InputError."""
    for number in least_and_most(lengths):
        if not 0 <= number <= kv_len and not (number > kv_len and _is_part()):
            raise InputError(
                f"{name} holds {number}; wanted 0 to {kv_len}, as many keys as the call has: count the keys of each row that "
                "are written."
            )


def check_offsets(name: str, offsets: np.ndarray) -> None:
    """Refuse offsets beyond 2**30, with which positions would wrap round. Errors: InputError."""
    for number in least_and_most(offsets):
        if not -LIMIT <= number <= LIMIT:
            raise InputError(
                f"{name} holds {number}; wanted at most 2**30 either way, or int32 positions wrap round: count positions from "
                "the first key of the call."
            )


def _checked(name: str, x: Any, arrays: Arrays, options: Options) -> Any:
    """One array, as int32 where its dtype is wider."""
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
    # A byte order of its own is no reason to refuse NumPy's integers; jax has one.
    return x.astype(np.int32) if x.dtype.itemsize > 2 else x


def at_hand(x: Any) -> np.ndarray | None:
    """Values that cost no transfer."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    devices: Any = x.sharding.device_set
    return known_values(x) if all(device.platform == "cpu" for device in devices) else None


def _is_part() -> bool:
    """Inside the caller's own shard_map the keys of a call may be a part of those that lengths count."""
    return bool(get_abstract_mesh().manual_axes)


@functools.lru_cache(maxsize=512)
def _leaf_names(structure: Mask) -> tuple[str, ...]:
    return tuple(leaf.name for leaf in structure.split()[1])
