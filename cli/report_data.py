"""The data of a report, from which the page is made."""

from __future__ import annotations

from typing import NamedTuple

from ..planning.cache.cache_plan import CachePlan
from ..planning.paged.page_reads import SequenceReads
from ..planning.tune_cache import Measured
from ..registry.declaration import Declaration
from ..verify.report import AnyPlan, TargetReport
from .ran import Ran

__all__ = ["PageData", "Searched"]


class Searched(NamedTuple):
    """The cached search of one pass: its candidates, best first, and which of them is the heuristic's choice."""

    target: str
    part: str
    how: str
    measured: tuple[Measured, ...]
    heuristic: int | None
    failed: int


class PageData(NamedTuple):
    """All data of a page. plan: shown if there is no target and nothing was compiled. cache, batch: of a step, the cache of all
    layers, and what each sequence reads."""

    declaration: Declaration
    plan: AnyPlan
    targets: tuple[TargetReport, ...]
    searches: tuple[Searched, ...]
    ran: Ran | None
    notes: tuple[str, ...]
    stamp: str
    cache: CachePlan | None = None
    batch: tuple[SequenceReads, ...] = ()
