"""IndexPlan: what was decided for a call of an indexer, as text and JSON; and SELECTIONS, how such calls are planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...masks.causal_window import causal_window
from ...sharding import FittedSpec, MeshAxis, TensorShape, fit_tensor
from ...sharding.mesh import unused_axes
from ..capability import Reason
from ..notes import note
from ..planner import Planner, Request
from ..tables.fitted_plan import FittedPlan, refuse_unfit
from ..tuning import versions
from .index_operands import INDEX, SELECTIONS_OF
from .index_problem import IndexProblem

__all__ = ["SELECTIONS", "IndexPlacement", "IndexPlan"]


class IndexPlacement(NamedTuple):
    """Where the arrays of a call and its results are."""

    tensors: tuple[FittedSpec, ...]

    def axes(self, tensor: str, at: int) -> tuple[str, ...]:
        """The mesh axes that split a dimension of a tensor."""
        return next((fitted.axes(at) for fitted in self.tensors if fitted.tensor == tensor), ())

    def idle(self, mesh: tuple[MeshAxis, ...]) -> list[str]:
        """`tp=2` for each mesh axis along which all devices do the same work: it splits neither batch nor queries."""
        used = {*self.axes("index_query", 0), *self.axes("index_query", 1)}
        return [axis.label for axis in unused_axes(mesh, used)]


@dataclass(frozen=True, eq=False, repr=False)
class IndexPlan(FittedPlan[IndexProblem, IndexPlacement]):
    """The plan of a selection. Queries are split as declared; each device has all keys of its batch rows while it selects."""

    def rows(self, verbose: bool = False) -> list[tuple[str, str]]:
        """The labelled lines after what runs."""
        problem = self.problem
        return [
            ("platform", f"{problem.platform}, from {problem.platform_source}"),
            ("mask", problem.mask.describe()),
            ("scale", f"{problem.softmax_scale:.6g}, scores in float32"),
            *self.config_rows(verbose),
        ]

    def facts(self) -> dict[str, Any]:
        """The sizes, and where the queries begin."""
        return {"sizes": self.problem.sizes, "query_offset": self.problem.query_offset}


class _Selections(Planner[IndexProblem, IndexPlacement]):
    plan: ClassVar[type[Any]] = IndexPlan
    unsearched = "an indexer's blocks aren't searched for"

    def placements(self, request: Request[IndexProblem]) -> Callable[[str], IndexPlacement]:
        placement = IndexPlacement(_tensors(request.problem))
        if request.policy.strict:
            refuse_unfit(request.problem, placement.tensors, placement.idle(request.problem.mesh))
        return lambda _: placement

    def reasons(self, request: Request[IndexProblem], method: str, placement: IndexPlacement) -> tuple[Reason, ...]:
        operation, problem, _ = request
        if causal_window(problem.mask) is None:
            text = f"the mask {problem.mask.describe()}: an indexer's is Causal and SlidingWindow, by positions"
            hint = "Leave the rest of the mask to the attention, or pass segment ids and kv_lengths."
            return (Reason("index.mask", "mask", text, hint),)
        capability = operation.implementation(method, problem.config).capability
        missing = sorted(problem.features - capability.consumes - problem.mask.features())
        return tuple(Reason(f"feature.{x}", x, f"{method} has no {x}", "Leave it out.") for x in missing)

    def notes(self, request: Request[IndexProblem], method: str, placement: IndexPlacement) -> tuple[str, ...]:
        problem = request.problem
        notes: tuple[str, ...] = ()
        if idle := placement.idle(problem.mesh):
            notes += (note("index.idle_axes", names=idle),)
        split = placement.axes("index_key", 1)
        if not split:
            return notes
        sizes = {axis.name: axis.size for axis in problem.mesh}
        whole = next(x for x in placement.tensors if x.tensor == "index_key").local_bytes * math.prod(
            sizes[x] for x in split
        )
        return (*notes, note("index.keys_gathered", axes=list(split), size=whole))

    def tune_key(self, method: str, problem: IndexProblem, placement: IndexPlacement) -> dict[str, Any]:
        return {
            "operation": problem.operation,
            "method": method,
            "device": problem.device,
            "dtype": problem.input_dtype,
            "key_dtype": problem.key_dtype,
            "shapes": dict(problem.sizes),
            "mask": problem.mask.describe(),
            "config": problem.config.to_dict(),
            "versions": versions(),
        }


def _tensors(problem: IndexProblem) -> tuple[FittedSpec, ...]:
    declared, sizes, tensors = dict(problem.specs), problem.sizes, []
    for row in (*INDEX, *SELECTIONS_OF):
        if row.optional and row not in SELECTIONS_OF and problem.operand(row.name) is None:
            continue
        shape = TensorShape(row.shape(sizes, "bthd"), problem.itemsize(row.name))
        tensors.append(fit_tensor(row.name, declared[row.name], shape, row.dims, problem.mesh))
    return tuple(tensors)


SELECTIONS = _Selections()
