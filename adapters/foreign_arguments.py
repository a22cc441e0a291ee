"""Arguments that the signatures of ragged paged attention share: checked, and in attnops' terms."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigError, InputError, InputTypeError, a_type, is_whole, shown
from ..operators.api.read_option import read_number
from ..operators.call.arrays import is_array
from ..planning.notes import note

__all__ = [
    "check_debug", "check_flat", "check_lengths", "check_mask_value", "check_uncarried", "flat_table", "heads_of",
    "sequences", "soft_cap_of", "softmax_scale", "table_by_starts", "unread", "window",
]  # fmt: skip

_HIDES = -1e30  # no logit is as large: where this or less is added or put in a logit's place, the weight is 0


def check_lengths(**arrays: Any) -> None:
    """Refuse what isn't an array of int32. Errors: InputTypeError."""
    for name, x in arrays.items():
        if not is_array(x) or x.dtype != np.int32:
            raise InputTypeError(f"{name} is {getattr(x, 'dtype', a_type(x))}; wanted an int32 array.")


def check_flat(kv_lens: Any, page_indices: Any) -> None:
    """Check that both have one dimension and something in it. Errors: InputError."""
    if len(page_indices.shape) != 1 or len(kv_lens.shape) != 1 or not kv_lens.shape[0] or not page_indices.shape[0]:
        raise InputError(
            f"page_indices has shape {tuple(page_indices.shape)} and kv_lens {tuple(kv_lens.shape)}; wanted one dimension in "
            "each: page ids of one sequence after the other, and [rows]."
        )


def flat_table(kv_lens: Any, page_indices: Any) -> tuple[int, int]:
    """Rows and width of a page table in one dimension. Errors: InputError."""
    check_flat(kv_lens, page_indices)
    rows = kv_lens.shape[0]
    if page_indices.shape[0] % rows:
        raise InputError(
            f"page_indices has {page_indices.shape[0]} ids for {rows} rows of kv_lens; wanted as many for each row."
        )
    return rows, page_indices.shape[0] // rows


def table_by_starts(page_indices: Any, cu_kv_lens: Any, page: int, width: int) -> jax.Array:
    """A table [rows, width] of ids in one dimension, in which a sequence's begin at its cu_kv_lens / page."""
    first = (jnp.asarray(cu_kv_lens)[:-1] + (page - 1)) // page
    places = first[:, None] + jnp.arange(width, dtype=np.int32)[None]
    return jnp.asarray(page_indices).at[places].get(mode="clip")


def check_uncarried(causal: Any, custom_mask: Any, xai_temperature_len: Any, softmax_dtype: Any) -> None:
    """Refuse what attention over pages doesn't have. Errors: ConfigError that names the argument; InputError."""
    if causal not in (0, 1):
        raise InputError(f"causal={shown(causal)}; wanted 1 or 0.")
    if custom_mask is not None and not causal:
        raise ConfigError(
            f"custom_mask {tuple(custom_mask.shape)}: keys lie in pages, which an array can't mask; wanted causal=1, or None for "
            "attention to all keys. Attend to a dense cache with 'vanilla' for such a mask."
        )
    if xai_temperature_len is not None:
        raise ConfigError(
            f"xai_temperature_len={shown(xai_temperature_len)}: attention over pages has no factor by position; wanted None. "
            "Multiply each query by its factor instead."
        )
    if softmax_dtype is not None and jnp.dtype(softmax_dtype) != jnp.float32:
        raise ConfigError(
            f"softmax_dtype={jnp.dtype(softmax_dtype).name}: over pages it is float32; wanted None or float32."
        )


def heads_of(keys: Any) -> int:
    """The kv heads of the step's keys."""
    if len(getattr(keys, "shape", ())) != 3:
        raise InputError(
            f"the keys have shape {tuple(getattr(keys, 'shape', ()))}; wanted [tokens, kv_heads, head_dim]."
        )
    return int(keys.shape[1])


def sequences(distribution: Any) -> Any:
    """The number of sequences, int32 []."""
    last = distribution[2]
    return np.asarray(last, np.int32) if isinstance(last, np.generic) else last


def softmax_scale(sm_scale: Any) -> float:
    """A number, 1 if it isn't given, as in their functions."""
    number = read_number("sm_scale", sm_scale)
    if number is not None and not math.isfinite(number):
        raise InputError(f"sm_scale={shown(sm_scale)}; wanted a finite number.")
    return 1.0 if number is None else number


def window(tokens: Any, causal: bool) -> tuple[int | None, int | None] | None:
    """The last tokens that a query sees, its own included, as distances."""
    if tokens is None:
        return None
    if not is_whole(tokens, numpy=True):
        raise InputTypeError(f"sliding_window={shown(tokens)}; wanted a number of tokens, or None.")
    if tokens < 1:
        raise InputError(
            f"sliding_window={tokens}; it must be positive: the number of last tokens that a query sees, its own included."
        )
    return int(tokens) - 1, 0 if causal else None


def soft_cap_of(value: Any) -> float | None:
    """A positive number, or None for no cap."""
    cap = read_number("soft_cap", value)
    if cap is not None and (cap == 0 or not math.isfinite(cap)):
        raise InputError(f"soft_cap={shown(value)}; it must not be 0.0 and must be finite: pass None for no cap.")
    return None if cap is None else abs(cap)  # cap * tanh(x / cap) is the same for either sign


def check_mask_value(value: Any) -> None:
    """Refuse a value that would leave hidden keys a weight; those that leave none are what attnops does. Errors:
    ConfigError."""
    number = read_number("mask_value", value)
    if number is not None and not number <= _HIDES:
        raise ConfigError(
            f"mask_value={shown(value)}: attnops gives hidden keys no weight at all; wanted None, or a number of at most "
            f"{_HIDES:g}, which means the same."
        )


def check_debug(debug_mode: Any) -> None:
    """Refuse the mode in which nothing is computed. Errors: ConfigError."""
    if debug_mode:
        raise ConfigError("debug_mode=True: their kernel then prints and attends to nothing; leave it out.")


def unread(**arguments: Any) -> tuple[str, ...]:
    """A note on arguments that were passed but change nothing here."""
    named = [f"{name}={shown(value)}" for name, value in arguments.items() if value is not None]
    if not named:
        return ()
    return (note("foreign.unread", arguments=named),)
