"""The arrays of a score as operands of a call: their names, dims and sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from ..errors import ScoreError
from ..scores import Score
from ..sharding import ATTENTION, Operand, OperandTable

__all__ = ["capture_sizes", "captured_names", "held_captures", "score_rows", "with_captures"]

_TAKEN = frozenset({"mask", "score", "mode", "layout", "causal", "output", "weights", "lse", "state", "layer", "batch"})


@functools.lru_cache(maxsize=512)
def _names_of(structure: Score) -> tuple[str, ...]:
    names = tuple(capture.name for capture in structure.captures())
    taken = [name for name in names if name in ATTENTION or name in _TAKEN]
    if taken:
        raise ScoreError(
            f"capture {taken[0]!r} of {structure} is named like an argument of a call; choose another name"
        )
    return names


def captured_names(score: Score) -> tuple[str, ...]:
    """The names of a score's arrays in a call. Errors: ScoreError for one that an argument of a call has."""
    return _names_of(score.structure())


@functools.lru_cache(maxsize=512)
def score_rows(structure: Score, ranks: tuple[int, ...]) -> OperandTable:
    """The operands of a score, each with the dims of its rank, or all that it may have if it fits none."""
    rows = []
    for capture, rank in zip(structure.captures(), ranks, strict=True):
        forms = (capture.dims, *capture.also)
        fitting = [dims for dims in forms if len(dims) == rank]
        dims, also = (fitting[0], ()) if fitting else (forms[0], forms[1:])
        rows.append(Operand(capture.name, dims, also=also, broadcasts=capture.broadcasts, feature="score"))
    return OperandTable(*rows)


def capture_sizes(structure: Score, kv_len: int) -> dict[str, int]:
    """The sizes of the dims that only a score's arrays have."""
    sizes = {"all_keys": kv_len}
    for capture in structure.captures():
        sizes |= dict(capture.sizes)
    return sizes


def held_captures(score: Score | None, heads: int) -> dict[str, np.ndarray]:
    """The arrays that a declared score has itself: its numbers, and those that follow from the number of query heads."""
    if score is None:
        return {}
    held = zip(captured_names(score), score.with_heads(heads).arrays(), strict=True)
    return {name: np.asarray(x, np.float32) for name, x in held if x is not None}


def with_captures(table: OperandTable, score: Score | None, shapes: Mapping[str, tuple[int, ...]]) -> OperandTable:
    """A table with the rows of a score's arrays. shapes: those that are known, by name; else an array has its first dims."""
    if score is None:
        return table
    ranks = (len(shapes.get(capture.name, capture.dims)) for capture in score.captures())
    captured_names(score)
    return OperandTable(*table, *score_rows(score.structure(), tuple(ranks)))
