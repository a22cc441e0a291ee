"""CALLS: how calls whose keys are arrays are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from .call_plan import Plan
from .capability import Reason
from .implementations import dequantised_copy
from .notes import note
from .placement import Placement
from .planner import Planner, Request
from .problem import AttentionProblem
from .sequence.choice import declared_strategy, placements
from .sequence.notes import sequence_notes
from .sequence.reasons import sequence_reasons
from .tuning import tune_key

__all__ = ["CALLS"]


class _Calls(Planner[AttentionProblem, Placement]):
    plan: ClassVar[type[Any]] = Plan

    def placements(self, request: Request[AttentionProblem]) -> Callable[[str], Placement]:
        return placements(*request)

    def reasons(self, request: Request[AttentionProblem], method: str, placement: Placement) -> tuple[Reason, ...]:
        operation, problem, policy = request
        runs = operation.implementation(method, problem.config)
        strategy = declared_strategy(operation, policy.sequence_parallel)
        return (
            *runs.capability.reasons(problem, runs.declared(problem.config)),
            *sequence_reasons(operation, problem, placement, method, strategy, policy.ring_order),
        )

    def notes(self, request: Request[AttentionProblem], method: str, placement: Placement) -> tuple[str, ...]:
        operation, problem, policy = request
        notes: tuple[str, ...] = ()
        if problem.quantised and operation.implementation(method, problem.config).capability.dequantises:
            notes += (note("memory.dequantised", method=method, **dequantised_copy(problem, placement)),)
        return (*notes, *operation.remarks(problem), *sequence_notes(operation, policy, placement))

    def tune_key(self, method: str, problem: AttentionProblem, placement: Placement) -> dict[str, Any]:
        return tune_key(method, problem, placement)


CALLS = _Calls()
