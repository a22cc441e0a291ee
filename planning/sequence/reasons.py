"""Reasons against a strategy for a split sequence, with hints."""

from __future__ import annotations

import math

from ..capability import Reason
from ..operation import PlannedOperation
from ..placement import Placement
from ..problem import AttentionProblem
from .split import is_triangular

__all__ = ["MERGING", "sequence_reasons"]

MERGING = "keys that stay split"  # the start of reasons against it

_NOT_AROUND = {
    "return_weights": "the attention weights",
    "quantized_kv": "quantised keys and values",
}
_ELSEWHERE = "Declare sequence_parallel='gather'."


def sequence_reasons(
    operation: type[PlannedOperation],
    problem: AttentionProblem,
    placement: Placement,
    method: str,
    declared: str,
    order: str | None,
) -> tuple[Reason, ...]:
    """Why a method can't run the strategy of a placement, with the declared strategy and ring order."""
    split = placement.sequence
    reasons = _of_queries(operation, problem, placement, declared)
    if split.strategy in ("", "gather"):
        return tuple(reasons)
    reasons += [*_of_all(problem, placement), *_of_keys_in_parts(operation, problem, placement, method)]
    if split.strategy == "ulysses_ring" and len(split.declared) < 2:
        reasons.append(
            Reason(
                "ulysses_ring.axes",
                "sequence_parallel",
                f"sequence_parallel='ulysses_ring' requires a sequence split over two mesh axes, but the rules name "
                f"{'+'.join(split.declared)}",
                "Name two in the partition axis, such as query_sequence_axis=('ring', 'sp'): heads are split over the last.",
            )
        )
    if split.ring_axes and order == "zigzag" and not is_triangular(problem, split.ring_size):
        chunks = 2 * split.ring_size
        reasons.append(
            Reason(
                "ring.zigzag",
                "ring_order",
                f"ring_order='zigzag' requires a mask under which no piece of the sequence sees a later one, and lengths "
                f"divisible into {chunks} pieces; the mask is {problem.mask.describe()}, q_len {problem.q_len}, "
                f"kv_len {problem.kv_len}",
                "Leave ring_order out.",
            )
        )
    return tuple(reasons)


def _of_queries(
    operation: type[PlannedOperation], problem: AttentionProblem, placement: Placement, declared: str
) -> list[Reason]:
    """A reason for queries that the mesh can't split as a declared ring or Ulysses requires. A length of 1 needs no split."""
    if declared not in ("ring", "ulysses", "ulysses_ring"):
        return []
    of_length = problem.layout.index("t")
    lost = [d for d in placement.fitted["query"].dropped if d.index == of_length and not d.harmless]
    if not lost:
        return []
    sizes = {axis.name: axis.size for axis in problem.mesh}
    absent = [drop for drop in lost if drop.axis not in sizes]
    count = math.prod(sizes[axis] for axis in placement.sequence.declared if axis in sizes)
    hint = f"Pad the queries and keys to a multiple of {count}" if not absent else absent[0].hint
    elsewhere = (
        _ELSEWHERE if operation.sequence_parallel is None else "Create an operation that can gather, such as 'splash'."
    )
    return [
        Reason(
            f"{declared}.q_len",
            "q_len",
            f"sequence_parallel={declared!r}: the queries can't be split over {'+'.join(d.axis for d in lost)}: "
            f"{lost[0].reason}",
            f"{hint}. {elsewhere}",
        )
    ]


def _subject(placement: Placement) -> str:
    split = placement.sequence
    return MERGING if split.strategy == "split_kv" else f"sequence_parallel={split.strategy!r}"


def _of_all(problem: AttentionProblem, placement: Placement) -> list[Reason]:
    """Reasons for lengths and heads that don't divide."""
    split, subject, reasons = placement.sequence, _subject(placement), []
    if problem.kv_len % split.shards:
        reasons.append(
            Reason(
                f"{split.strategy}.kv_len",
                "kv_len",
                f"{subject}: {problem.kv_len} keys don't divide over the {split.shards} devices of {'+'.join(split.axes)}",
                f"Pad the keys to a multiple of {split.shards}. {_ELSEWHERE}",
            )
        )
    heads = placement.outer_kv_heads
    if heads % split.head_size:
        other = "'ulysses_ring' on two mesh axes, or 'ring'" if split.strategy == "ulysses" else "'ring'"
        reasons.append(
            Reason(
                f"{split.strategy}.kv_heads",
                "kv_heads",
                f"{subject}: the {heads} kv heads of a device don't divide over the {split.head_size} devices of "
                f"{'+'.join(split.head_axes)}",
                f"Declare sequence_parallel={other}, or split heads over fewer devices.",
            )
        )
    if "return_weights" in problem.features:
        reasons.append(_no_way(split.strategy, "return_weights", subject))
    return reasons


def _of_keys_in_parts(
    operation: type[PlannedOperation], problem: AttentionProblem, placement: Placement, method: str
) -> list[Reason]:
    """Reasons why a kernel can't run a ring or work on keys that stay split."""
    split, subject, reasons = placement.sequence, _subject(placement), []
    if not split.ring_axes and split.strategy != "split_kv":
        return []
    if not operation.implementation(method, problem.config).works_on_parts(
        problem.config, "ring" if split.ring_axes else "split_kv"
    ):
        reasons.append(
            Reason(
                f"{split.strategy}.parts",
                "sequence_parallel",
                f"{subject}: this method (with this config) can't work on parts of the keys",
                f"{_ELSEWHERE} vanilla, and splash with its own kernels, can.",
            )
        )
    if split.ring_axes:
        reasons += [
            _no_way(split.strategy, feature, subject)
            for feature in _NOT_AROUND
            if feature in problem.features and feature != "return_weights"
        ]
    if problem.softmax_dtype not in ("float32", "float64"):
        reasons.append(
            Reason(
                f"{split.strategy}.softmax_dtype",
                "runtime_softmax_dtype",
                f"{subject}: outputs are merged by their log-sum-exp, for which {problem.softmax_dtype} is too coarse",
                "Leave runtime_softmax_dtype at float32.",
            )
        )
    return reasons


def _no_way(strategy: str, feature: str, subject: str) -> Reason:
    return Reason(f"{strategy}.{feature}", feature, f"{subject}: no support for {_NOT_AROUND[feature]}", _ELSEWHERE)
