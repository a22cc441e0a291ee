"""Entry: a candidate that can run. Refusal: candidates that can't, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..registry.declaration import Declaration
from ..verify.report import TargetReport
from .candidates import Candidate
from .declared import declared_as
from .estimate import Estimate

__all__ = ["Entry", "Refusal", "Refusals"]


@dataclass(frozen=True)
class Entry:
    """A candidate that can run: plan and estimate. base_declaration: the one it was made from, with any chosen block sizes.
    strategy, order: what is done about a split sequence, and of a ring its order. compiled: the report, if requested."""

    candidate: Candidate
    base_declaration: Declaration
    plan: Any
    estimate: Estimate
    strategy: str = ""
    order: str | None = None
    notes: tuple[str, ...] = ()
    compiled: TargetReport | None = None

    @property
    def declaration(self) -> Declaration:
        """The declaration to write. Planned as it stands, it gives this plan."""
        return declared_as(self.base_declaration, self.candidate, self.estimate.machine)

    @property
    def seconds_a_row(self) -> float:
        """Seconds per batch row, to compare candidates with different batches."""
        return self.estimate.seconds / self.candidate.batch

    @property
    def ranked_seconds(self) -> float:
        """The same, to four digits: closer times rank as equal."""
        return float(f"{self.seconds_a_row:.4g}")

    @property
    def differs(self) -> bool:
        """Whether its compiled program sends something other than its strategy has to, and so takes longer than estimated."""
        return self.compiled is not None and any(report.differences for report in self.compiled.passes)

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory of a device, by the compiler."""
        passes = () if self.compiled is None else self.compiled.passes
        return max((report.peak_bytes for report in passes if report.compiled), default=None)


@dataclass(frozen=True)
class Refusal:
    """Candidates of one kind that can't run, all for one reason: how many, of which operations, and the first mesh."""

    kind: str
    operations: tuple[str, ...]
    reason: str
    count: int
    example: str

    def __str__(self) -> str:
        about = f" ({', '.join(self.operations)})" if self.operations else ""
        count = "1 candidate" if self.count == 1 else f"{self.count} candidates"
        return f"{self.kind}{about}: {count}; on {self.example}: {self.reason}"


class Refusals:
    """Refusals by kind and code, with the reason and the mesh of the first, and the operations concerned."""

    def __init__(self) -> None:
        self.by_reason: dict[tuple[str, str], Refusal] = {}

    def add(self, kind: str, operation: str, code: str, reason: str, where: str) -> None:
        """Add one candidate."""
        first = Refusal(kind, (), reason, 0, where)
        before = self.by_reason.get((kind, code), first)
        operations = tuple(dict.fromkeys((*before.operations, *([operation] if operation else []))))
        self.by_reason[kind, code] = replace(before, operations=operations, count=before.count + 1)

    def ranked(self) -> tuple[Refusal, ...]:
        """Those with the most candidates first."""
        return tuple(sorted(self.by_reason.values(), key=lambda refusal: -refusal.count))
