"""RecurrenceSearch: the chunks of a planned recurrence, by static clock or by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from ..planning import OperationConfig, PlannedOperation
from ..planning.recurrent.planner import RECURRENCES
from ..planning.tables.table_plan import TablePlacement
from ..planning.tables.table_problem import TableProblem
from ..planning.tuning import config_with
from .local_recurrence import LocalRecurrence, scheduled_recurrence
from .search import Scheduled, Search

__all__ = ["RecurrenceSearch"]


class RecurrenceSearch(Search):
    """A planned recurrence: its forward pass or, in mode train, that with its gradient, which goes by the same chunks."""

    def __init__(
        self, operation: type[PlannedOperation], method: str, problem: TableProblem, placement: TablePlacement
    ) -> None:
        self.operation, self.method, self.problem, self.placement = operation, method, problem, placement
        self.local = LocalRecurrence.of(problem, placement)
        self.key = RECURRENCES.tune_key(method, problem, placement)
        self.device_kind = problem.device_kind

    def candidates(self, how: str) -> Mapping[str, tuple[dict[str, Any], ...]]:
        del how
        runs: Any = self.operation.implementation(self.method, self.problem.config)
        candidates: Mapping[str, tuple[dict[str, Any], ...]] = runs.candidates(self.problem, self.placement)
        return candidates

    def resolve(self, fields: Mapping[str, Any]) -> OperationConfig:
        return config_with(self.operation, self.method, self.problem, self.placement, fields)

    def program(self, part: str, fields: Mapping[str, Any]) -> Callable[[], Any]:
        function, _ = self.local.program(fields, part)
        return partial(jax.jit(function), self.local.drawn())

    def scheduled(self, part: str, fields: dict[str, Any]) -> Scheduled:
        del part
        return scheduled_recurrence(self.operation, self.method, self.problem, self.placement, fields)
