"""The arguments of a call: the arrays apart from everything static, and the mask that they make together."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, InputTypeError, a_type, shown
from ..masks import And, Causal, Dense, Full, Lengths, Mask, SegmentIds, SlidingWindow
from ..planning.other_names import CALL_ARGUMENTS, refuse_unknown
from ..registry.metadata import METADATA_ARGUMENTS
from ..sharding.modes import GENERATION

__all__ = ["Arrays", "Options", "bound_mask", "is_array", "join_mask", "refuse_arguments", "shaped", "split_arguments"]

_NOT_IN_JAX = (
    np.longdouble, np.clongdouble, np.object_, np.str_, np.bytes_, np.void, np.timedelta64, np.datetime64
)  # fmt: skip


class Arrays(NamedTuple):
    """Every array of a call (or its ShapeDtypeStruct), None where it wasn't given. A pytree."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    softmax_aux: Any = None
    query_offset: Any = None
    dropout_rng: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    kv_lengths: Any = None
    key_scale: Any = None
    value_scale: Any = None
    mask_leaves: tuple[Any, ...] = ()


class Options(NamedTuple):
    """Everything static of a call, as given. `mask` is a structure whose arrays stand in Arrays.mask_leaves."""

    mask: Mask | None
    mask_is_array: bool
    causal: bool | None
    sliding_window: tuple[int | None, int | None] | None
    query_offset: int | None
    softmax_scale: float | None
    logits_soft_cap: float | None
    dropout_prob: float | None
    deterministic: bool
    return_weights: bool
    return_lse: bool
    mode: str | None
    layout: str


def refuse_arguments(unknown: Iterable[str]) -> NoReturn:
    """Raise for keywords that a call doesn't have. Errors: InputTypeError that says what they are called here."""
    refuse_unknown([name for name in unknown if name not in CALL_ARGUMENTS], CALL_ARGUMENTS, "call", METADATA_ARGUMENTS)


_DEFAULTS = Options(None, False, None, None, None, None, None, None, True, False, False, None, "bthd")


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype: an array, a tracer or a ShapeDtypeStruct."""
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def shaped(name: str, value: Any) -> jax.ShapeDtypeStruct:
    """Return shape and canonical dtype. Errors: InputTypeError for what isn't an array."""
    if not is_array(value):
        raise InputTypeError(f"{name} is {a_type(value)}; wanted a jax or numpy array.")
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if dtype.type in _NOT_IN_JAX or not dtype.isnative:
            raise InputTypeError(f"{name} has dtype {dtype}, which jax doesn't have; cast it, e.g. to float32.")
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(value.shape, dtype)


def split_arguments(
    query: Any, key: Any, value: Any, *, mask: Any, bias: Any, causal: Any, sliding_window: Any, q_segment_ids: Any,
    kv_segment_ids: Any, kv_lengths: Any, query_offset: Any, softmax_scale: Any, logits_soft_cap: Any, softmax_aux: Any,
    key_scale: Any, value_scale: Any, dropout_prob: Any, dropout_rng: Any, deterministic: Any, return_weights: Any,
    return_lse: Any, mode: Any, layout: Any,
) -> tuple[Arrays, Options]:  # fmt: skip
    """Sort the arguments of a call into arrays and options. Cheap: checks types only where it sorts by them."""
    leaves: tuple[Any, ...] = ()
    structure: Mask | None = None
    mask_is_array = False
    if mask is not None:
        if isinstance(mask, Mask):
            structure = mask
        elif is_array(mask):
            structure, mask_is_array = Dense(mask), True
        else:
            raise InputTypeError(
                f"mask is {a_type(mask)}; wanted a Mask (such as Causal()) or a boolean array that broadcasts "
                "to [batch, heads, q, kv]."
            )
        if not structure.is_static:
            structure, split = structure.split()
            leaves = tuple(leaf.array for leaf in split)
    offset_array = query_offset if is_array(query_offset) else None
    arrays = Arrays(
        query,
        key,
        value,
        bias,
        softmax_aux,
        offset_array,
        dropout_rng,
        q_segment_ids,
        kv_segment_ids,
        kv_lengths,
        key_scale,
        value_scale,
        leaves,
    )
    if (
        causal is None and sliding_window is None and query_offset is None and softmax_scale is None
        and logits_soft_cap is None and dropout_prob is None and deterministic is True and return_weights is False
        and return_lse is False and mode is None and type(layout) is str and layout == "bthd"
    ):  # fmt: skip
        # Nothing to check: most calls, in a third of the time.
        return arrays, _DEFAULTS if structure is None else Options(structure, mask_is_array, *_DEFAULTS[2:])
    options = Options(
        mask=structure,
        mask_is_array=mask_is_array,
        causal=_flag("causal", causal, optional=True),
        sliding_window=_window(sliding_window),
        query_offset=None if offset_array is not None else _integer("query_offset", query_offset),
        softmax_scale=_number("softmax_scale", softmax_scale),
        logits_soft_cap=_number("logits_soft_cap", logits_soft_cap),
        dropout_prob=_number("dropout_prob", dropout_prob),
        deterministic=_flag("deterministic", deterministic),
        return_weights=_flag("return_weights", return_weights),
        return_lse=_flag("return_lse", return_lse),
        mode=_name("mode", mode, optional=True),
        layout=_name("layout", layout),
    )
    return arrays, options


def join_mask(arrays: Arrays, options: Options, default_causal: bool) -> Mask:
    """Return the intersection of everything that masks: the mask, causal, window, segment ids, lengths.

    A Mask object says all about its own structure, so the metadata's `causal` is a default for calls without one.
    """
    parts: list[Mask] = []
    if options.mask is not None:
        parts.append(options.mask if options.mask.is_static else options.mask.merge(arrays.mask_leaves))
    structured = options.mask is not None and not options.mask_is_array
    if options.causal or (options.causal is None and default_causal and not structured):
        parts.append(Causal())
    if options.sliding_window is not None and options.sliding_window != (None, None):
        parts.append(SlidingWindow(*options.sliding_window))
    if arrays.q_segment_ids is not None:
        parts.append(SegmentIds(arrays.q_segment_ids, arrays.kv_segment_ids))
    if arrays.kv_lengths is not None:
        parts.append(Lengths(arrays.kv_lengths))
    flat = [m for part in parts for m in part.conjuncts() if not isinstance(m, Full)]
    distinct = [m for i, m in enumerate(flat) if not (m.is_static and m in flat[:i])]
    return Full() if not distinct else distinct[0] if len(distinct) == 1 else And(tuple(distinct))


def bound_mask(
    mask: Mask, arrays: Arrays, options: Options, mode: str, q_len: int, kv_len: int
) -> tuple[Mask, int | None, bool]:
    """Give every offset that the mask leaves open: (mask, static offset, whether the offset is known only at run time).

    Errors: InputError where q and kv differ in length and nothing says how they are aligned.
    """
    if not mask.needs_offset:
        return mask, None, False
    if options.query_offset is not None:
        return mask.bind(options.query_offset), options.query_offset, False
    if arrays.query_offset is not None:
        return mask, None, True
    if mode in GENERATION:
        if cache_lengths(mask, arrays) is not None:
            return mask, None, True  # the queries are the last tokens of each row's cache
        return mask.bind(kv_len - q_len), kv_len - q_len, False
    if q_len == kv_len:
        return mask.bind(0), 0, False
    raise InputError(
        f"q_len={q_len} and kv_len={kv_len} differ and the mask {mask.describe()} depends on positions; say how they are "
        f"aligned: query_offset=0 (the first query sees the first key), query_offset={kv_len - q_len} (the last query sees "
        f"the last key), Causal(offset=...), or mode='autoregressive' with a cache."
    )


def run_time_offset(mask: Mask, arrays: Arrays, batch: int, q_len: int) -> jax.Array:
    """The [batch] offset that is known only at run time: the given one, else from the cache's lengths."""
    if arrays.query_offset is not None:
        return jnp.broadcast_to(jnp.asarray(arrays.query_offset, jnp.int32), (batch,))
    return jnp.asarray(cache_lengths(mask, arrays), jnp.int32) - q_len


def cache_lengths(mask: Mask, arrays: Arrays) -> Any:
    """The lengths of the cache, given as the argument or inside the mask; None where there are none.

    Errors: InputError for several, which could disagree.
    """
    found = [m.kv for m in mask.conjuncts() if isinstance(m, Lengths)]
    if len(found) > 1:
        raise InputError(
            f"the mask {mask.describe()} holds lengths {len(found)} times; pass query_offset, or join them."
        )
    return found[0] if found else arrays.kv_lengths


def _number(name: str, value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    if is_array(value):
        raise InputTypeError(f"{name} is an array; wanted a Python number: it is part of what gets compiled.")
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise InputTypeError(f"{name}={shown(value)}; wanted a number.")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name}={shown(value)}; wanted a number that fits in a float.") from None


def _integer(name: str, value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    if isinstance(value, bool):
        raise InputTypeError(f"{name}={shown(value)}; wanted an integer or an integer array [batch].")
    try:
        return operator.index(value)
    except TypeError:
        raise InputTypeError(f"{name}={shown(value)}; wanted an integer or an integer array [batch].") from None


def _flag(name: str, value: Any, *, optional: bool = False) -> Any:
    if value is True or value is False or (value is None and optional):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise InputTypeError(f"{name} is {shown(value)}; wanted True or False" + (" or None." if optional else "."))


def _name(name: str, value: Any, *, optional: bool = False) -> Any:
    if isinstance(value, str) or (value is None and optional):
        return value
    raise InputTypeError(f"{name} is {a_type(value)}; wanted a string" + (" or None." if optional else "."))


def _window(value: Any) -> tuple[int | None, int | None] | None:
    """A bare integer n is (n, n), as jax.nn.dot_product_attention's local_window_size has it."""
    if value is None:
        return None
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise InputError(f"sliding_window={shown(value)}; wanted an integer or (left, right) inclusive distances.")
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer)):
            raise InputTypeError(
                f"sliding_window={shown(value)}; wanted an integer or (left, right) inclusive distances."
            )
    left, right = (None if side is None else int(side) for side in sides)
    for side in (left, right):
        if side is not None and side < 0:
            raise InputError(f"sliding_window={shown(value)}; wanted distances of 0 or more, None for no limit.")
    return left, right
