"""A score as the bias of jax.nn's attention: what only adds to logits is computed as an array before the call."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from ...planning import AttentionProblem, Placement, Rule
from ...planning.notes import note
from ...scores.steps import Add, Diagonal, Linear, Lookup, Product
from ..call.local import LocalCall
from ..kernels.scores import WholeScores, apply_steps

__all__ = ["ONLY_ADDS", "bias_note", "with_score_as_bias"]

_SUMS = frozenset(step.name for step in (Add, Diagonal, Linear, Lookup, Product))
ONLY_ADDS = Rule(
    "sdpa.score",
    "score",
    lambda p, c: p.score is None or p.score.step_names(p.contiguous_positions) <= _SUMS,
    "score {p.score}: jax.nn's attention takes a bias, and this does more than add to logits",
    "Use 'vanilla', or the platform's kernels.",
)


def with_score_as_bias(call: LocalCall) -> LocalCall:
    """The call with its score in the bias, both in float32."""
    if call.score is None:
        return call
    local, kinds = call.placement.local, zip(call.captures, call.score.forms, strict=True)
    batches, heads = {1}, {1}
    for x, form in kinds:
        batches |= {x.shape[0]} if form != "table" else set()
        heads |= {x.shape[0 if form == "table" else 1]}
    if call.score.positions or not isinstance(call.mask.query_offset or 0, int):
        batches |= {local.batch}
    zeros = jnp.zeros((max(batches), max(heads), call.mask.q_len, call.mask.kv_len), jnp.float32)
    tile = WholeScores(call.score, call.captures, call.mask, np.dtype(np.float32), slice(0, call.mask.kv_len))
    added = apply_steps(call.score, zeros, 1.0, 1.0, tile).x
    return replace(call, bias=added if call.bias is None else added + call.bias.astype(jnp.float32))


def bias_note(problem: AttentionProblem, placement: Placement, itemsize: int) -> tuple[str, ...]:
    """What the bias takes."""
    if problem.score is None:
        return ()
    local = placement.local
    dims = {dim for x in problem.operands if x.operand.feature == "score" for dim in x.operand.dims}
    by_row = "batch" in dims or problem.dynamic_query_offset or not problem.contiguous_positions
    shape = local.batch if by_row else 1, local.q_heads if "heads" in dims else 1, local.q_len, local.kv_len
    return (note("score.bias_bytes", score=str(problem.score), size=itemsize * int(np.prod(shape)), shape=shape),)
