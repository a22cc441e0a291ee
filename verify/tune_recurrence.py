"""RecurrenceSearch: the chunks of a planned recurrence, by static clock or by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from ..planning import PlannedOperation
from ..planning.tables.table_plan import TablePlacement
from ..planning.tables.table_problem import TableProblem
from .local_recurrence import LocalRecurrence, scheduled_recurrence
from .search import Scheduled, Search

__all__ = ["RecurrenceSearch"]


class RecurrenceSearch(Search):
    """A planned recurrence: its forward pass or, in mode train, that with its gradient, which goes by the same chunks."""

    def __init__(
        self, operation: type[PlannedOperation], method: str, problem: TableProblem, placement: TablePlacement
    ) -> None:
        super().__init__(operation, method, problem, placement)
        self.local = LocalRecurrence.of(problem, placement)

    def program(self, part: str, fields: Mapping[str, Any]) -> Callable[[], Any]:
        function, _ = self.local.program(fields, part)
        return partial(jax.jit(function), self.local.drawn())

    def scheduled(self, part: str, fields: dict[str, Any]) -> Scheduled:
        return scheduled_recurrence(self.kind, self.method, self.problem, self.placement, fields)
