"""What an indexer's call is checked for: sizes and dtypes, how many keys, the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError, InputError, InputTypeError, is_whole, shown
from ...masks import Mask, has_place
from ...planning.selection.index_operands import INDEX
from ..call.arguments import join_mask, split_arguments
from ..call.arrays import Arrays
from ..call.table_sizes import call_sizes as table_sizes

__all__ = ["call_sizes", "selected_count", "static_options"]


def call_sizes(shapes: Mapping[str, Any]) -> dict[str, int]:
    """Every dim's size, checked. Errors: InputError for a shape or a dtype."""
    sizes = table_sizes(INDEX, shapes, "bthd")
    if ("q_segment_ids" in shapes) != ("kv_segment_ids" in shapes):
        raise InputError("segment ids of queries or of keys are given alone; wanted q_segment_ids and kv_segment_ids.")
    stored = shapes["index_key"].dtype
    if (stored.itemsize == 1) != ("key_scale" in shapes):
        wanted = "a key_scale [batch, kv]" if stored.itemsize == 1 else "no key_scale"
        raise InputError(f"index_key is {stored}; wanted {wanted} beside it.")
    return sizes


def selected_count(given: Any, declared: int | None) -> int:
    """How many keys each query selects. Errors: InputError for none and for no whole number, ConfigError for two."""
    if given is not None and not is_whole(given, 1, numpy=True):
        raise InputError(f"top_k={shown(given)}; wanted a whole number from 1 on.")
    if given is not None and declared is not None and given != declared:
        raise ConfigError(f"top_k={given}, but the config declares {declared}; leave one of them out.")
    if (chosen := declared if given is None else given) is None:
        raise InputError(
            "top_k is missing: how many keys does each query select? Pass it, or declare it in the config."
        )
    return int(chosen)


def static_options(call: Mapping[str, Any], default_causal: bool) -> tuple[Mask, float | None]:
    """(the mask, the declared scale) of a call's keywords. Errors: InputTypeError for a mask with arrays; those of a call."""
    names = ("mask", "causal", "sliding_window", "softmax_scale")
    if has_place(call.get("mask")):
        raise InputError("the mask has a place for segment ids; wanted a Mask of Causal and SlidingWindow.")
    arrays, options = split_arguments(None, None, None, {name: call[name] for name in names if name in call})
    if options.mask_is_array or arrays.mask_leaves:
        raise InputTypeError("mask holds arrays; wanted a Mask of Causal and SlidingWindow.")
    return join_mask(Arrays({}), options, default_causal), options.softmax_scale
