"""The arguments of a call: arrays separated from everything static, and the mask that they make together."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, InputTypeError, a_type, shown
from ..masks import And, Causal, Dense, Full, Lengths, Mask, Not, SegmentIds, SlidingWindow
from ..planning.call_arguments import CALL_ARGUMENTS, CallArguments, CallOptions
from ..planning.other_names import refuse_unknown
from ..registry.metadata import METADATA_ARGUMENTS
from ..sharding.modes import GENERATION
from ..symbolic import is_symbolic, surely

__all__ = [
    "Arrays", "Options", "bound_mask", "check_names", "is_array", "join_mask", "read_flag", "read_number", "read_window",
    "shaped", "split_arguments", "takes_call_arguments",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

_INTEGERS = frozenset({"q_segment_ids", "kv_segment_ids", "kv_lengths", "kv_starts", "query_offset"})
_NOT_IN_JAX = (
    np.longdouble, np.clongdouble, np.object_, np.str_, np.bytes_, np.void, np.timedelta64, np.datetime64
)  # fmt: skip


class Arrays(NamedTuple):
    """Every array of a call (or its ShapeDtypeStruct); None where it wasn't given. A pytree."""

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
    kv_starts: Any = None
    key_scale: Any = None
    value_scale: Any = None
    mask_leaves: tuple[Any, ...] = ()


class Options(NamedTuple):
    """Everything static in a call, with its defaults. `mask` is a structure whose arrays are in Arrays.mask_leaves."""

    mask: Mask | None = None
    mask_is_array: bool = False
    causal: bool | None = None
    sliding_window: tuple[int | None, int | None] | None = None
    query_offset: int | None = None
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    dropout_prob: float | None = None
    deterministic: bool = True
    return_weights: bool = False
    return_lse: bool = False
    mode: str | None = None
    layout: str = "bthd"


_DEFAULTS = Options()
_KNOWN = frozenset(CALL_ARGUMENTS)


def takes_call_arguments(function: Function) -> Function:
    """Show the `**call` of a method as its actual keywords, for help() and inspect.signature."""
    whole = inspect.signature(function)
    shown_as = [p for p in whole.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, kind in CallArguments.__annotations__.items():
        written, default = getattr(kind, "__forward_arg__", kind), Options._field_defaults.get(name)
        shown_as.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=written))
    function.__signature__ = whole.replace(parameters=shown_as)  # type: ignore[attr-defined]
    return function


def check_names(call: Mapping[str, Any]) -> None:
    """Refuse keywords that a call doesn't have. Errors: InputTypeError that gives their name here."""
    if not _KNOWN.issuperset(call):
        refuse_unknown([n for n in call if n not in _KNOWN], CALL_ARGUMENTS, "call", METADATA_ARGUMENTS)


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype: an array, a tracer or a ShapeDtypeStruct."""
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def shaped(name: str, value: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype, jax's own for floats (float32 for float64 without jax_enable_x64). An array that holds no floats,
    or should hold none, keeps its dtype, so that a message shows the one that was passed. Errors: InputTypeError if the value
    isn't an array."""
    if not is_array(value):
        raise InputTypeError(f"{name} is {a_type(value)}; wanted a jax or numpy array.")
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if dtype.type in _NOT_IN_JAX or not dtype.isnative:
            raise InputTypeError(f"{name} has dtype {dtype}, which jax doesn't have; cast it, e.g. to float32.")
        if name not in _INTEGERS and jnp.issubdtype(dtype, jnp.floating):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(value.shape, dtype)


def split_arguments(query: Any, key: Any, value: Any, call: CallArguments) -> tuple[Arrays, Options]:
    """Sort the arguments of a call into arrays and options. Cheap: checks only the types that decide the sorting."""
    if not call:  # most calls
        return Arrays(query, key, value), _DEFAULTS
    check_names(call)
    arrays: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, given in call.items():
        check = _CHECKS.get(name)
        if name == "mask":
            if given is not None:
                options["mask"], options["mask_is_array"], arrays["mask_leaves"] = _structure(given)
        elif check is None or (name == "query_offset" and is_array(given)):
            arrays[name] = given
        else:
            options[name] = check(name, given)
    return Arrays(query, key, value, **arrays), Options(**options) if options else _DEFAULTS


def _structure(mask: Any) -> tuple[Mask, bool, tuple[Any, ...]]:
    """(the mask without its arrays, whether it was an array, its arrays)."""
    if not isinstance(mask, Mask) and not is_array(mask):
        raise InputTypeError(
            f"mask is {a_type(mask)}; wanted a Mask (such as Causal()) or a boolean array that broadcasts "
            "to [batch, heads, q, kv]."
        )
    whole = mask if isinstance(mask, Mask) else Dense(mask)
    if whole.is_static:
        return whole, False, ()
    structure, leaves = whole.split()
    return structure, whole is not mask, tuple(leaf.array for leaf in leaves)


def join_mask(arrays: Arrays, options: Options, default_causal: bool) -> Mask:
    """Return the intersection of everything that masks: mask, causal, window, segment ids, lengths, starts.

    A Mask object defines its whole structure, so the metadata's `causal` is a default for calls without one.
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
    if arrays.kv_starts is not None:
        parts.append(Not(Lengths(arrays.kv_starts)))
    flat = [m for part in parts for m in part.conjuncts() if not isinstance(m, Full)]
    distinct = [m for i, m in enumerate(flat) if not (m.is_static and m in flat[:i])]
    return Full() if not distinct else distinct[0] if len(distinct) == 1 else And(tuple(distinct))


def bound_mask(
    mask: Mask, arrays: Arrays, options: Options, mode: str, q_len: int, kv_len: int
) -> tuple[Mask, int | None, bool]:
    """Set every offset that the mask leaves open: (mask, static offset, whether the offset is known only at run time).

    Errors: InputError if q and kv differ in length and nothing specifies how they are aligned.
    """
    if not mask.needs_offset:
        return mask, None, False
    if arrays.query_offset is not None or is_symbolic(options.query_offset):
        return mask, None, True
    if options.query_offset is not None:
        return mask.bind(options.query_offset), options.query_offset, False
    if mode in GENERATION:
        if cache_lengths(mask, arrays) is not None:
            return mask, None, True  # the queries are the last tokens of each row's cache
        if is_symbolic(kv_len - q_len):
            return mask, None, True  # the queries are the last tokens, and how many come before them isn't known yet
        return mask.bind(kv_len - q_len), kv_len - q_len, False
    if q_len == kv_len:
        return mask.bind(0), 0, False
    last = "autoregressive" if surely(lambda: q_len == 1) else "insert"
    raise InputError(
        f"q_len={q_len} and kv_len={kv_len} differ and the mask {mask.describe()} depends on positions; specify how they are "
        f"aligned: query_offset=0 (the first query sees the first key), query_offset={kv_len - q_len} (the last query sees "
        f"the last key), Causal(offset=...), or mode={last!r}: the queries are the last tokens of a cache."
    )


def run_time_offset(mask: Mask, arrays: Arrays, options: Options, batch: int, q_len: int, kv_len: int) -> jax.Array:
    """The [batch] offset that is known only at run time: as given, or from the cache's lengths or its symbolic length."""
    given = arrays.query_offset if options.query_offset is None else options.query_offset
    if given is not None:
        return jnp.broadcast_to(jnp.asarray(given, jnp.int32), (batch,))
    lengths = cache_lengths(mask, arrays)
    if lengths is None:
        return jnp.broadcast_to(jnp.asarray(kv_len - q_len, jnp.int32), (batch,))
    return jnp.asarray(lengths, jnp.int32) - jnp.asarray(q_len, jnp.int32)


def cache_lengths(mask: Mask, arrays: Arrays) -> Any:
    """The lengths of the cache, from the argument or the mask; None if there are none.

    Errors: InputError if there are several, because they might disagree.
    """
    found = [m.kv for m in mask.conjuncts() if isinstance(m, Lengths)]
    if len(found) > 1:
        raise InputError(
            f"the mask {mask.describe()} holds lengths {len(found)} times; pass query_offset, or merge them."
        )
    return found[0] if found else arrays.kv_lengths


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


def _integer(name: str, value: Any) -> int | None:
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


def _name(name: str, value: Any, *, optional: bool = False) -> Any:
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


# By the type in CallOptions; a new type needs a check here.
_OF_TYPE: dict[Any, Callable[[str, Any], Any]] = {
    bool: read_flag, bool | None: partial(read_flag, optional=True), float | None: read_number,
    str: _name, str | None: partial(_name, optional=True),
}  # fmt: skip
_OF_NAME: dict[str, Callable[[str, Any], Any]] = {"sliding_window": read_window, "query_offset": _integer}
_CHECKS = {name: _OF_NAME.get(name) or _OF_TYPE[kind] for name, kind in get_type_hints(CallOptions).items()}
