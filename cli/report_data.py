"""What a report tells, gathered: a page is made of it."""

from __future__ import annotations

from typing import NamedTuple

from ..planning import Plan
from ..planning.tune_cache import Measured
from ..registry.declaration import Declaration
from ..verify.call import TargetReport
from .ran_call import Ran

__all__ = ["Reported", "Searched"]


class Searched(NamedTuple):
    """What a search has kept of one pass of a call: its candidates, the best first; which is the heuristic's."""

    target: str
    part: str
    how: str
    measured: tuple[Measured, ...]
    heuristic: int | None
    failed: int


class Reported(NamedTuple):
    """All that a page tells. plan: where there is no target, and nothing was compiled."""

    declaration: Declaration
    plan: Plan
    targets: tuple[TargetReport, ...]
    searches: tuple[Searched, ...]
    ran: Ran | None
    notes: tuple[str, ...]
    made: str
