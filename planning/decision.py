"""Decision: what every plan is, of a call or of a step over pages: what runs, with which config, and why nothing else does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from jax.sharding import PartitionSpec

from ..errors import RefusedError
from ..lazy import LazyModule
from ..sharding.mesh import AnyMesh
from .capability import Reason
from .config_lines import ConfigLine, config_lines
from .implementations import Implementation, Padding
from .operation import PlannedOperation
from .operation_config import OperationConfig
from .policy import Policy
from .problem import Problem
from .route import Route
from .tuning import Tuning

if TYPE_CHECKING:
    from .. import drawing
    from .cache.cache_plan import CachePlan
else:
    drawing = LazyModule("attnops.drawing")  # with the first picture

__all__ = ["WHY", "Decision", "Kind", "Rejected", "Screen"]

P = TypeVar("P", bound=Problem)
L = TypeVar("L")


class Screen(NamedTuple):
    """A plan for a terminal. rows: labelled lines after what runs. tensors: the heading of a table and its rows, without a table
    only (). ends: labelled lines after it."""

    rows: list[tuple[str, str]]
    tensors: tuple[tuple[str, ...], ...] = ()
    ends: tuple[tuple[str, str], ...] = ()


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
class Decision(Generic[P, L]):
    """What will run, with which config, where every tensor is, and why nothing else runs.

    `kind` is 'platform' (the platform's own method), 'native' (the platform has none of its own), 'routed' (the platform's own
    method leaves such calls to forward_native), 'fallback' (it refuses) or 'refused' (`implementation` is then None). `mesh` is
    the mesh that the plan was made for, if an operation made it; it isn't compared, pickled or serialised.
    """

    operation: type[PlannedOperation]
    problem: P
    policy: Policy
    kind: Kind
    implementation: str | None
    method: str | None
    config: OperationConfig
    placement: L
    rejected: tuple[Rejected, ...]
    padding: Padding | None = None
    route: Route | None = None
    tuning: Tuning | None = None
    notes: tuple[str, ...] = ()
    mesh: AnyMesh | None = None

    # What is planned, in reports: a call, or a step over pages.
    subject: ClassVar[str] = "call"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.problem, self.policy))

    def _key(self) -> tuple[object, ...]:
        return self.operation, self.problem, self.policy, self.tuning  # everything else follows from these

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.implementation or 'refused'}: {self.problem.describe()})"

    def __str__(self) -> str:
        return self.explain()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "mesh": None}  # devices can't be pickled

    @property
    def cache(self) -> CachePlan | None:
        """The cache that a step reads and writes; None for a call."""
        return None

    @property
    def runs(self) -> Implementation[Any] | None:
        """The implementation that was chosen; None if nothing can run."""
        return None if self.method is None else self.operation.implementation(self.method, self.config)

    def require(self) -> Self:
        """Return self. Errors: RefusedError with every reason if nothing can run."""
        if self.implementation is None:
            raise RefusedError(self.refusal())
        return self

    def refusal(self) -> str:
        """All reasons, one per line."""
        lines = [f"  {r.implementation}: {reason}" for r in self.rejected for reason in r.reasons]
        return "\n".join((f"{self.problem.describe()}:", *lines))

    def spec_of(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array of the call, of this name and shape, before the call starts."""
        raise NotImplementedError

    def config_lines(self) -> list[ConfigLine]:
        """Every field of the config, and where its value comes from."""
        return config_lines(self.config, self.problem.config, {} if self.tuning is None else self.tuning.fields)

    @property
    def rejected_rows(self) -> list[tuple[str, str]]:
        """A labelled line for every reason why the others don't run."""
        return [("not", f"{r.implementation}: {reason}") for r in self.rejected for reason in r.reasons]

    def screen(self, more: str, notes: tuple[str, ...] = (), verbose: bool = False) -> Screen:
        """One screen of the plan, or all of it, for a terminal; `notes` come after its own. more: how a reader gets all of it."""
        raise NotImplementedError

    def page_rows(self) -> list[tuple[str, str]]:
        """One screen of it as labelled lines, after what runs, for a page."""
        raise NotImplementedError

    def brief_rows(self) -> list[tuple[str, str]]:
        """What a list of several targets says of the plan besides what runs."""
        return []

    def placement_picture(self) -> drawing.DevicePicture | None:
        """A picture of the tensors over the mesh, where there is more to see than one device. Default: none."""
        return None

    def explain(self, verbose: bool = False) -> str:
        """The decision as text: what runs and why, and what needs your attention. With `verbose`, all of it."""
        raise NotImplementedError

    def decision_dict(self) -> dict[str, Any]:
        """What every plan has, as JSON-ready values."""
        problem = self.problem
        return {
            "operation": problem.operation,
            "implementation": self.implementation,
            "kind": self.kind,
            "platform": problem.platform,
            "platform_source": problem.platform_source,
            "device_kind": problem.device_kind,
            "mode": problem.mode,
            **problem.described_options(),
            "features": sorted(problem.features),
            "config": self.config.every_field(),
            "mesh": [axis._asdict() for axis in problem.mesh],
            "tuning": None if self.tuning is None else self.tuning.to_dict(),
            "rejected": [
                {"implementation": r.implementation, "reasons": [reason._asdict() for reason in r.reasons]}
                for r in self.rejected
            ],
            "notes": list(self.notes),
        }
