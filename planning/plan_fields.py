"""PlanFields: what was decided for a call, as data. Plan adds the methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..sharding.mesh import AnyMesh
from .capability import Reason
from .implementations import Implementation, Padding
from .operation import PlannedOperation
from .operation_config import OperationConfig
from .placement import Placement
from .policy import Policy
from .problem import AttentionProblem
from .route import Route
from .tuning import Tuning

__all__ = ["WHY", "Kind", "PlanFields", "Rejected"]


Kind = Literal["platform", "native", "routed", "fallback", "refused"]
WHY = {
    "platform": "the platform's own implementation",
    "native": "dispatch: no better implementation for this platform",
    "routed": "dispatch: the platform's own implementation leaves such calls to it",
    "fallback": "FALLBACK: the platform's own implementation refused",
    "refused": "REFUSED: no implementation may run this",
}


class Rejected(NamedTuple):
    """An implementation that was tried, and every reason against it."""

    implementation: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, eq=False)
class PlanFields:
    """The fields of Plan, which documents them."""

    operation: type[PlannedOperation]
    problem: AttentionProblem
    policy: Policy
    kind: Kind
    implementation: str | None
    method: str | None
    config: OperationConfig
    placement: Placement
    rejected: tuple[Rejected, ...]
    padding: Padding | None
    route: Route | None
    tuning: Tuning | None
    notes: tuple[str, ...]
    mesh: AnyMesh | None = None

    @property
    def runs(self) -> Implementation[Any] | None:
        """The implementation that was chosen; None if nothing can run."""
        return None if self.method is None else self.operation.implementation(self.method, self.config)
