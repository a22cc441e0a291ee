"""The data of a report, from which the page is made."""

from __future__ import annotations

from typing import NamedTuple

from ..planning import Plan
from ..planning.tune_cache import Measured
from ..registry.declaration import Declaration
from ..verify.call import TargetReport
from .ran_call import Ran

__all__ = ["Reported", "Searched"]


class Searched(NamedTuple):
    """The cached search of one pass of a call: its candidates, best first, and which of them is the heuristic's choice."""

    target: str
    part: str
    how: str
    measured: tuple[Measured, ...]
    heuristic: int | None
    failed: int


class Reported(NamedTuple):
    """All data of a page. plan: shown if there is no target and nothing was compiled."""

    declaration: Declaration
    plan: Plan
    targets: tuple[TargetReport, ...]
    searches: tuple[Searched, ...]
    ran: Ran | None
    notes: tuple[str, ...]
    made: str
