"""The score of a call: its arrays are operands by name, and become the arrays of its steps on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import InputError, InputTypeError, a_type
from ...planning import AttentionProblem
from ...planning.cache.cache_checks import axis_names
from ...planning.score_operands import captured_names
from ...scores import ALiBi, Score, SoftCap
from ...scores.node import Chain
from ...scores.steps import Lowering, Steps
from ...sharding import OperandTable
from ..kernels.local_mask import LocalMask, score_positions
from ..kernels.varying import vary, varying
from .arrays import Arrays, is_array

__all__ = ["check_in_shard_map", "lowered", "read_score", "without_cap"]


def read_score(score: Any, query: Any, layout: str, call: Mapping[str, Any]) -> tuple[Score, dict[str, Any]]:
    """(the score without arrays, its arrays by name), those of the call among them. Errors: InputTypeError for something else
    than a score; InputError for an array that is given nowhere or twice; ScoreError for a name that a call's argument has."""
    if not isinstance(score, Score):
        hint = f"; pass an object: {score.__name__}(...)" if isinstance(score, type) else ""
        raise InputTypeError(f"score is {a_type(score)}; wanted a Score, such as ALiBi() or SoftCap(50.0){hint}.")
    by_heads = score
    if is_array(query) and len(query.shape) == len(layout) and "h" in layout:
        by_heads = score.with_heads(query.shape[layout.index("h")])
    arrays: dict[str, Any] = {}
    for name, held, default in zip(captured_names(score), score.arrays(), by_heads.arrays(), strict=True):
        given = call.get(name)
        if held is not None and given is not None:
            raise InputError(f"{name} is given in the score {score} and in the call; leave one of them out.")
        array = default if given is None else given
        if array is None:
            raise InputError(f"score {score} needs {name}; pass {name}= in the call, or to the score.")
        arrays[name] = jnp.asarray(array, jnp.float32) if isinstance(array, tuple) else array
    in_call = any(call.get(name) is not None for name in arrays)
    return score.structure() if in_call else score.without_values(), arrays


def check_in_shard_map(
    score: Score, captured: OperandTable, shapes: Arrays, manual: Sequence[str], rules: Any, parts_of_sequence: bool
) -> None:
    """Refuse what a device's part of a call in the caller's own shard_map can't know. manual: the axes of that;
    parts_of_sequence: whether its queries are a part of a split sequence. Errors: InputError."""
    heads = [name for name in axis_names(rules.head_axis) if name in manual]
    if heads and any(isinstance(part, ALiBi) and part.slopes is None for part in score.parts()):
        raise InputError(
            f"ALiBi() takes its slopes from the number of heads, and inside your own shard_map over {'+'.join(heads)} a call has "
            "a device's heads only; pass ALiBi(slopes) with this device's slopes: attnops.scores.paper_slopes(heads) has all."
        )
    by_row = [row.name for row in captured if {"q_len", "kv_len"} & set(row.dims)] if parts_of_sequence else []
    if by_row and max(shapes.by_name[by_row[0]].shape, default=1) > 1:
        raise InputError(
            f"{by_row[0]} has a number for each query or key, and inside your own shard_map a call has a part of the sequence; "
            "pass it in a call outside of the shard_map."
        )


def without_cap(score: Score) -> tuple[float | None, Score | None]:
    """(the soft cap that a score begins with, the rest): `logits_soft_cap` under its other name."""
    first, *rest = score.parts()
    if not isinstance(first, SoftCap):
        return None, score
    return first.cap, None if not rest else rest[0] if len(rest) == 1 else Chain(tuple(rest))


def lowered(
    problem: AttentionProblem, operands: Mapping[str, jax.Array], mask: LocalMask, keys: int
) -> tuple[Steps | None, tuple[jax.Array, ...]]:
    """The steps of a problem's score on a device, and their arrays. keys: how many keys aligned arrays have here."""
    if problem.score is None:
        return None, ()
    positions = None if problem.symbolic and not mask.mask.conjuncts() else score_positions(mask)
    lowering = Lowering(
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        rows=mask.q_len,
        keys=keys,
        first_row=mask.q_start,
        first_key=mask.k_start,
        offset=0 if mask.query_offset is None else mask.query_offset,
        positions=positions,
        known_lengths=not problem.symbolic,
        dtype=jnp.dtype(problem.softmax_dtype),
    )
    # As varying as the tensors from here on: their gradients are summed over devices in their own shapes.
    axes = varying(tuple(operands[row.name] for row in problem.required))
    problem.score.lower([vary(operands[name], axes) for name in captured_names(problem.score)], lowering)
    return lowering.result()
