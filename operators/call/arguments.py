"""The arguments of a call: arrays separated from everything static, and the mask that they make together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp

from ...call_arguments import CALL_ARGUMENTS, CallOptions
from ...errors import InputError, InputTypeError, a_type
from ...masks import SEGMENT_IDS, And, Causal, Dense, Full, Lengths, Mask, Not, SegmentIds, SlidingWindow
from ...planning.other_names import refuse_unknown
from ...planning.problem import positions_leaf
from ...registry.metadata import METADATA_ARGUMENTS
from ...scores import Score
from ...sharding import ATTENTION, OperandTable
from ...sharding.modes import GENERATION
from ...symbolic import is_symbolic, surely
from ..api.read_option import read_flag, read_integer, read_name, read_number, read_window
from .arrays import Arrays, is_array
from .call_scores import read_score, without_cap
from .key_columns import KeyColumns
from .options import Options

__all__ = ["bound_mask", "check_names", "join_mask", "split_arguments"]

_DEFAULTS = Options()
_KNOWN = frozenset(CALL_ARGUMENTS)
_STATIC_OR_ARRAY = "query_offset"


def check_names(call: Mapping[str, Any], further: Collection[str] = ()) -> None:
    """Refuse keywords that a call doesn't have; further: an operation's own. Errors: InputTypeError with their name here."""
    if not _KNOWN.issuperset(call):
        unknown = [name for name in call if name not in _KNOWN and name not in further]
        if unknown:
            refuse_unknown(unknown, (*CALL_ARGUMENTS, *further), "call", METADATA_ARGUMENTS)


def split_arguments(
    query: Any, key: Any, value: Any, call: Mapping[str, Any], table: OperandTable = ATTENTION
) -> tuple[Arrays, Options]:
    """Sort the arguments of a call into arrays and options. Cheap: checks only the types that decide the sorting."""
    arrays: dict[str, Any] = {"query": query, "key": key}
    options: dict[str, Any] = {}
    if isinstance(value, KeyColumns):
        options["value_columns"] = value.of(key).count
    else:
        arrays["value"] = value
    if not call:  # most calls
        return Arrays(arrays), Options(**options) if options else _DEFAULTS
    score: Score | None = None
    captured: dict[str, Any] = {}
    if call.get("score") is not None:
        layout = call.get("layout", _DEFAULTS.layout)
        score, captured = read_score(call["score"], query, layout if isinstance(layout, str) else "", call)
    check_names(call, (*table.names, *captured))
    leaves: tuple[Any, ...] = ()
    for name, argument in call.items():
        if name == "score" or name in captured:
            continue
        check = _CHECKS.get(name)
        if name == "mask":
            if argument is not None:
                options["mask"], options["mask_is_array"], leaves = _structure(argument)
        elif check is None or (name == _STATIC_OR_ARRAY and is_array(argument)):
            if argument is not None:
                arrays[name] = argument
        else:
            options[name] = check(name, argument)
    if any(leaf is None for leaf in leaves):
        options["mask"], leaves = _placed(options["mask"], leaves, arrays, options.get("layout") == "thd")
    if score is not None:
        arrays |= captured
        cap, options["score"] = (None, score) if options.get("logits_soft_cap") is not None else without_cap(score)
        if cap is not None:
            options["logits_soft_cap"] = cap
    return Arrays(arrays, leaves), Options(**options) if options else _DEFAULTS


def _placed(mask: Mask, leaves: tuple[Any, ...], arrays: dict[str, Any], packed: bool) -> tuple[Mask, tuple[Any, ...]]:
    """The arrays of a mask with the call's segment ids in their place, where they no longer intersect with all of it."""
    places = [leaf for leaf in mask.leaves() if leaf.is_slot and leaf == SEGMENT_IDS]
    if len(places) != 1 or sum(leaf is None for leaf in leaves) != 2:
        raise InputError(f"the mask {mask.describe()} has places without arrays; wanted at most one, of segment ids.")
    query = arrays.pop("q_segment_ids", None)
    kv = arrays.pop("kv_segment_ids", query)
    if query is None or kv is None:
        raise InputError(
            f"the mask {mask.describe()} has a place for segment ids; pass q_segment_ids, and kv_segment_ids for other keys."
        )
    if packed:
        raise InputError(
            f"the mask {mask.describe()} has a place for segment ids, which in layout 'thd' separate sequences; use 'bthd'."
        )
    given = iter((query, kv))
    return mask, tuple(next(given) if leaf is None else leaf for leaf in leaves)


def _structure(mask: Any) -> tuple[Mask, bool, tuple[Any, ...]]:
    """(the mask without its arrays, whether it was an array, its arrays)."""
    if not isinstance(mask, Mask) and not is_array(mask):
        raise InputTypeError(
            f"mask is {a_type(mask)}; wanted a Mask (such as Causal()) or a boolean array that broadcasts "
            "to [batch, heads, q, kv]."
        )
    joined = mask if isinstance(mask, Mask) else Dense(mask)
    if joined.is_static:
        return joined, False, ()
    structure, leaves = joined.split()
    return structure, joined is not mask, tuple(leaf.array for leaf in leaves)


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

    A score that depends on positions needs the offset too.

    Errors: InputError if q and kv differ in length and nothing specifies how they are aligned.
    """
    of_score = options.score is not None and options.score.needs_positions and not positions_leaf(mask)
    if not mask.needs_offset and not of_score:
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
    what = f"the mask {mask.describe()}" if mask.needs_offset else f"the score {options.score}"
    raise InputError(
        f"q_len={q_len} and kv_len={kv_len} differ and {what} depends on positions; specify how they are "
        f"aligned: query_offset=0 (the first query sees the first key), query_offset={kv_len - q_len} (the last query sees "
        f"the last key), Causal(offset=...), or mode={last!r}: the queries are the last tokens of a cache."
    )


def run_time_offset(mask: Mask, arrays: Arrays, options: Options, batch: int, q_len: int, kv_len: int) -> jax.Array:
    """The [batch] offset that is known only at run time: as given, or from the cache's lengths or its symbolic length."""
    query_offset = arrays.query_offset if options.query_offset is None else options.query_offset
    if query_offset is not None:
        return jnp.broadcast_to(jnp.asarray(query_offset, jnp.int32), (batch,))
    lengths = cache_lengths(mask, arrays)
    if lengths is None:
        return jnp.broadcast_to(jnp.asarray(kv_len - q_len, jnp.int32), (batch,))
    return jnp.asarray(lengths, jnp.int32) - jnp.asarray(q_len, jnp.int32)


def cache_lengths(mask: Mask, arrays: Arrays) -> Any:
    """The lengths of the cache, from the argument or the mask; None if there are none.

    Errors: InputError if there are several, because they might disagree.
    """
    lengths = [m.kv for m in mask.conjuncts() if isinstance(m, Lengths)]
    if len(lengths) > 1:
        raise InputError(
            f"the mask {mask.describe()} holds lengths {len(lengths)} times; pass query_offset, or merge them."
        )
    return lengths[0] if lengths else arrays.kv_lengths


# By the type in CallOptions; a new type needs a check here.
_OF_TYPE: dict[Any, Callable[[str, Any], Any]] = {
    bool: read_flag, bool | None: partial(read_flag, optional=True), float | None: read_number,
    str: read_name, str | None: partial(read_name, optional=True),
}  # fmt: skip
_OF_NAME: dict[str, Callable[[str, Any], Any]] = {"sliding_window": read_window, "query_offset": read_integer}
_CHECKS = {name: _OF_NAME.get(name) or _OF_TYPE[kind] for name, kind in get_type_hints(CallOptions).items()}
