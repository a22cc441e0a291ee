"""CALLS: how calls whose keys are arrays are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from .call_plan import Plan
from .capability import Reason
from .implementations import dequantised_copy
from .notes import note
from .operation import PlannedOperation
from .placement import Placement
from .planner import Planner
from .policy import Policy
from .problem import AttentionProblem
from .sequence.choice import declared_strategy, placements
from .sequence.notes import sequence_notes
from .sequence.reasons import sequence_reasons
from .tuning import Tuning, searched, tune_key

__all__ = ["CALLS"]


class _Calls(Planner[AttentionProblem, Placement]):
    plan: ClassVar[type[Any]] = Plan

    def placements(
        self, operation: type[PlannedOperation], problem: AttentionProblem, policy: Policy
    ) -> Callable[[str], Placement]:
        return placements(operation, problem, policy)

    def reasons(
        self,
        operation: type[PlannedOperation],
        method: str,
        problem: AttentionProblem,
        placement: Placement,
        policy: Policy,
    ) -> tuple[Reason, ...]:
        capability = operation.implementation(method, problem.config).capability
        strategy = declared_strategy(operation, policy.sequence_parallel)
        return (
            *capability.reasons(problem, problem.config),
            *sequence_reasons(operation, problem, placement, method, strategy, policy.ring_order),
        )

    def notes(
        self,
        operation: type[PlannedOperation],
        problem: AttentionProblem,
        policy: Policy,
        placement: Placement,
        method: str,
    ) -> tuple[str, ...]:
        notes: tuple[str, ...] = ()
        if problem.quantised and operation.implementation(method, problem.config).capability.dequantises:
            notes += (note("memory.dequantised", method=method, **dequantised_copy(problem, placement)),)
        return (*notes, *operation.remarks(problem), *sequence_notes(operation, policy, placement))

    def tune_key(self, method: str, problem: AttentionProblem, placement: Placement) -> dict[str, Any]:
        return tune_key(method, problem, placement)

    def search(
        self, operation: type[PlannedOperation], method: str, problem: AttentionProblem, placement: Placement
    ) -> Tuning:
        return searched(operation, method, problem, placement)


CALLS = _Calls()
