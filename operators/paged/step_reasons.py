"""Reasons against any method for a step over pages: its mask, its features, its window, its pages."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from ...masks.page_mask import page_mask
from ...planning import Reason, Rule
from ...planning.paged.paged_problem import PagedProblem
from ..choices.dtype_rules import float32_softmax, plain_dtypes

__all__ = ["BY_HEAD", "DTYPE", "POSITIONS", "SOFTMAX", "SPANNED", "TPU_KERNEL", "step_reasons", "written_first"]

SOFTMAX = float32_softmax("paged", "over pages it is")
DTYPE = plain_dtypes("paged", "queries over pages are")
TPU_KERNEL = Rule(
    "paged.kernel",
    "kernel",
    lambda p, c: getattr(c, "kernel", None) in (None, "tpu"),
    "kernel='{c.kernel}' is declared",
    "Leave kernel out.",
)
_BY_HEAD = frozenset({"heads", "buckets", "entries"})
BY_HEAD = Rule(
    "paged.score",
    "score",
    lambda p, c: all(set(x.operand.dims) <= _BY_HEAD for x in p.operands if x.operand.feature == "score"),
    "score {p.score}: a step's tokens are of several sequences, so its arrays are by head, or tables",
    "Attend to a dense cache with 'vanilla' for arrays by query or key.",
)


def _positions_suffice(problem: Any, config: Any) -> bool:
    """Whether the positions of queries, where they are given, are all that is read of positions."""
    if problem.operand("q_positions") is None:
        return True
    mask, parts = page_mask(problem.mask), () if problem.score is None else problem.score.parts()
    alone = all(part.by_query_alone or not part.needs_positions for part in parts)
    read = any(part.by_query_alone for part in parts)
    return read and alone and mask is not None and mask.window == (None, None) and mask.chunk is None


POSITIONS = Rule(
    "paged.positions",
    "q_positions",
    _positions_suffice,
    "q_positions beside the mask {p.mask} and the score {p.score}: pages don't keep the positions of their keys, so windows, "
    "chunks and scores by distance can't know them, and without a score by the query's position nothing reads them",
    "Leave q_positions out where they are the tokens' places in their sequences; else pass a score such as PositionTemperature.",
)


SPANNED = frozenset({"spans", "prefix_lengths"})
"""Features with which rows of one token are the TPU kernel's for chunks, which writes none."""


def written_first(problem: PagedProblem) -> list[str]:
    """The features beside which the kernels write nothing: spans, keys that tokens name, which needn't be their own, and pages of
    a sequence on several devices, of which one has the token's."""
    return sorted(problem.features & (SPANNED | {"selected"})) + ["page_sequence_axis"] * (problem.sequence_shards > 1)


def step_reasons(problem: PagedProblem, method: str, consumes: Set[str], name: str, layout: str | None) -> list[Reason]:
    """`consumes` are the method's features, `layout` the page layout that the operation's name stands for."""
    reasons = []
    unread: Set[str] = frozenset()
    if page_mask(problem.mask) is None:
        text = f"the mask {problem.mask.describe()}: over pages it is Causal, SlidingWindow and Chunked, by positions"
        hint = "Leave the rest of the mask to the attention."
        if problem.top_k is None:
            hint = "Pass prefix_lengths or spans for tokens that see one another, or attend to a dense cache with 'vanilla'."
        reasons.append(Reason("paged.mask", "mask", text, hint))
        unread = problem.mask.features()
    reasons += _window_reasons(problem)
    if problem.reads_layer is not None and problem.update != "none":
        text = f"update={problem.update!r}: the layer reads the keys and values of layer {problem.reads_layer} and has no pages"
        hint = "Give update='none', without key and value, or leave the layer out of cache.reads_layer."
        reasons.append(Reason("paged.reads_layer", "update", text, hint))
    for feature in sorted(problem.features - consumes - unread):
        hint = "Leave it out, or declare fallback='allow'."
        reasons.append(Reason(f"feature.{feature}", feature, f"{method} has no {feature}", hint))
    if layout not in (None, problem.layout):
        text = f"{name} stands for pages of layout {layout!r}, but the cache declares {problem.layout!r}"
        hint = f"Declare cache.layout={layout!r}, or use the operation 'paged'."
        reasons.append(Reason("paged.layout", "cache.layout", text, hint))
    return reasons


def _window_reasons(problem: PagedProblem) -> tuple[Reason, ...]:
    """The reason against a window larger than the one for which the layer's pages are kept."""
    mask, stored = page_mask(problem.mask), problem.cache.window_tokens
    if mask is None or stored is None or problem.mode == "insert":
        return ()
    left = mask.most_left
    if left is not None and left < stored:
        return ()
    text = (
        f"the mask {problem.mask.describe()} sees more than the window of {stored} tokens for which the cache keeps these "
        "layers' pages: older ones may hold another sequence"
    )
    hint = f"Give sliding_window=({stored - 1}, 0) or a smaller one, or declare the layer in a group without window_tokens."
    return (Reason("paged.window_prefix", "sliding_window", text, hint),)
