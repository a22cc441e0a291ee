"""StepArguments: what a step over pages takes besides query, key, value, cache and batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

from ...call_arguments import CALL_ARGUMENTS, CallArray
from ...errors import InputError, InputTypeError, a_type, nearest, shown
from ...masks import Mask, has_place
from ...planning.cache.kv_cache import KVCache
from ...planning.paged.paged_problem import STEP_MODES
from ...planning.score_operands import captured_names
from ...scores import Score
from ..call.arguments import join_mask, split_arguments
from ..call.arrays import Arrays
from ..paged_cache.batch_checks import longest_row
from ..paged_cache.state import CacheState

__all__ = ["Step", "StepArguments", "StepArrays", "cache_of", "step_of"]


class StepArguments(TypedDict, total=False):
    """The keywords of a step, of its plan and of its explanation; those that a call has too have the same meaning."""

    mask: Mask | None
    causal: bool | None
    sliding_window: int | tuple[int | None, int | None] | None
    softmax_aux: CallArray | None
    key_scale: CallArray | None
    value_scale: CallArray | None
    selected: CallArray | None
    draft_tree: CallArray | None
    spans: CallArray | None
    prefix_lengths: CallArray | None
    q_positions: CallArray | None
    softmax_scale: float | None
    logits_soft_cap: float | None
    score: Score | None
    return_lse: bool
    mode: str | None
    update: str | None
    max_q_len: int | None
    debug: bool


class Step(NamedTuple):
    """The static arguments of a step, checked. `update` is None if the config decides; top_k: for a step that selects keys."""

    mask: Mask
    softmax_scale: float | None
    logits_soft_cap: float | None
    score: Score | None
    return_lse: bool
    mode: str
    update: str | None
    max_q_len: int | None
    debug: bool
    top_k: int | None = None


class StepArrays(NamedTuple):
    """The arrays of a step besides query, key, value and batch; None where they aren't given."""

    sinks: Any = None
    key_scale: Any = None
    value_scale: Any = None
    captures: tuple[Any, ...] = ()  # of the score, in its order
    selected: Any = None
    index_weights: Any = None
    draft_tree: Any = None
    spans: Any = None
    prefix_lengths: Any = None
    q_positions: Any = None

    @property
    def flat(self) -> tuple[Any, ...]:
        """All of them."""
        return *self[:3], *self.captures, *self[4:]


_ELSEWHERE = {
    "kv_lengths": "the batch's kv_lens are the keys of each sequence",
    "query_offset": "queries are at the end of their sequences, as the batch's kv_lens specify",
    "q_segment_ids": "the batch specifies the sequence of each token",
    "kv_segment_ids": "the batch specifies the sequence of each token",
    "layout": "tokens are [tokens, heads, dim]; the cache declares the layout of pages",
    "bias": "attention over pages has no bias",
    "dropout_prob": "serving has no dropout",
    "dropout_rng": "serving has no dropout",
    "deterministic": "serving has no dropout",
    "return_weights": "weights over pages aren't computed",
}


def cache_of(cache: Any) -> KVCache:
    """The declared cache of a plan: a KVCache, or that of a state. Errors: InputTypeError."""
    if cache is None:
        raise InputTypeError(
            "cache is missing; a plan is one of a step: pass query, key and value, [tokens, heads, dim], as arrays or "
            "jax.ShapeDtypeStructs, and cache=, a KVCache or the state that a call takes as state=."
        )
    declared = cache.cache if isinstance(cache, CacheState) else cache
    if not isinstance(declared, KVCache):
        raise InputTypeError(f"cache is {a_type(cache)}; wanted a KVCache, or a CacheState made from one.")
    return declared


def step_of(call: StepArguments, default_causal: bool, query: Any) -> tuple[Step, StepArrays]:
    """(the static arguments, the arrays). query: [tokens, heads, dim], whose heads a score may ask for.

    Errors: InputTypeError for names that a step doesn't have, InputError for invalid values.
    """
    arguments: Mapping[str, Any] = call
    score = arguments.get("score")
    captured = captured_names(score) if isinstance(score, Score) else ()
    for name in arguments:
        if name in StepArguments.__annotations__ or name in captured:
            continue
        if name in _ELSEWHERE:
            raise InputTypeError(f"a step over pages takes no {name}: {_ELSEWHERE[name]}.")
        raise InputTypeError(
            f"unknown argument {shown(name)} of a step over pages." + nearest(name, StepArguments.__annotations__)
        )
    shared: Any = {
        name: value
        for name, value in arguments.items()
        if name in captured or (name in CALL_ARGUMENTS and name != "mode")
    }
    if has_place(shared.get("mask")):
        raise InputError(
            "the mask has a place for segment ids, which a step over pages doesn't take; pass spans= instead."
        )
    arrays, options = split_arguments(query, None, None, shared | {"layout": "thd"})
    if options.mask_is_array or arrays.mask_leaves:
        raise InputTypeError(
            "mask holds arrays; wanted a Mask of Causal, SlidingWindow and Chunked: keys lie in pages, which no array can mask. "
            "Arrays of a step are spans, prefix_lengths, draft_tree and selected."
        )
    longest = longest_row(arguments.get("max_q_len"))
    mode = _mode(arguments.get("mode"), longest)
    update = arguments.get("update")
    if update not in (None, "before", "fused", "none"):
        raise InputError(f"update={shown(update)}; wanted 'before', 'fused' or 'none', or None for the config's.")
    debug = arguments.get("debug", False)
    if not isinstance(debug, bool):
        raise InputTypeError(f"debug={shown(debug)}; wanted True or False.")
    return (
        Step(
            join_mask(Arrays({}), options, default_causal),
            options.softmax_scale,
            options.logits_soft_cap,
            options.score,
            options.return_lse,
            mode,
            update,
            1 if mode == "autoregressive" and longest is None else longest,
            debug,
        ),
        StepArrays(
            arrays.softmax_aux,
            arrays.key_scale,
            arrays.value_scale,
            tuple(arrays.by_name[name] for name in (() if options.score is None else captured_names(options.score))),
            **{
                name: arguments.get(name)
                for name in ("selected", "draft_tree", "spans", "prefix_lengths", "q_positions")
            },
        ),
    )


def _mode(mode: Any, longest: int | None) -> str:
    if mode is None:
        return "mixed" if longest is None else "autoregressive"
    plain = mode.strip("_") if isinstance(mode, str) else mode
    plain = "autoregressive" if plain == "decode" else plain
    if not isinstance(plain, str) or plain not in STEP_MODES:
        hint = ": serving has no gradient" if plain == "train" else ""
        raise InputError(f"mode={shown(mode)}; a step over pages is one of {', '.join(STEP_MODES)}{hint}.")
    return plain
