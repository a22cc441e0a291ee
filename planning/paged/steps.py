"""STEPS: how steps whose keys lie in a cache's pages are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ...errors import RefusedShardingError
from ...sharding import FittedSpec, TensorShape, fit_tensor
from ..capability import Reason
from ..notes import note
from ..planner import Planner, Request
from .page_reads import selected_bytes
from .paged_plan import PagedPlan, StepPlacement
from .paged_problem import PagedProblem
from .step_operands import step_spec
from .step_tuning import step_key

__all__ = ["STEPS"]


class _Steps(Planner[PagedProblem, StepPlacement]):
    plan: ClassVar[type[Any]] = PagedPlan
    unsearched = "tuning='tune' doesn't search for a step, because a plan doesn't know its lengths; `attnops tune` does"

    def placements(self, request: Request[PagedProblem]) -> Callable[[str], StepPlacement]:
        operation, problem, policy = request
        placement = StepPlacement(_tensors(operation, problem))
        if policy.strict and (repeated := problem.repeated_axes):
            names = ", ".join(axis.label for axis in repeated)
            raise RefusedShardingError(f"strict: {problem.describe()}: {names} split nothing of the selection.")
        return lambda _: placement

    def reasons(self, request: Request[PagedProblem], method: str, placement: StepPlacement) -> tuple[Reason, ...]:
        reasons: tuple[Reason, ...] = request.operation.reasons_against(method, request.problem)
        return reasons

    def notes(self, request: Request[PagedProblem], method: str, placement: StepPlacement) -> tuple[str, ...]:
        problem = request.problem
        notes: tuple[str, ...] = ()
        if (selected := problem.operand("selected")) is not None:
            notes += (note("paged.selected", count=selected.shape[1], size=selected_bytes(problem)),)
        if (tree := problem.operand("draft_tree")) is not None:
            notes += (note("paged.draft_tree", drafts=tree.shape[1]),)
        if repeated := problem.repeated_axes:
            notes += (note("index.idle_axes", names=[axis.label for axis in repeated]),)
        if merges := problem.merges:
            axes = problem.sequence_axes
            size, sent = sum(merge.size for merge in merges), int(sum(merge.sent for merge in merges))
            made = (
                note("paged.merged", axes=axes, size=size, sent=sent)
                if problem.top_k is None
                else note("index.merged", axes=axes, size=size, sent=sent)
            )
            notes += (made,)
        return notes

    def tune_key(self, method: str, problem: PagedProblem, placement: StepPlacement) -> dict[str, Any]:
        return step_key(method, problem)


def _tensors(operation: Any, problem: PagedProblem) -> tuple[FittedSpec, ...]:
    """Where a step's arrays and results are, by the tables of its operation."""
    tensors = []
    captures = [x.operand for x in problem.operands if x.operand.feature == "score"]
    rows = [(row, problem.tensor(row.name)) for row in (*operation.operands, *captures, *operation.results)]
    for row, tensor in rows:
        if tensor is None:
            continue
        shape, itemsize = tensor
        dims = row.dims[: len(shape)]
        tensors.append(
            fit_tensor(row.name, step_spec(problem.cache, dims), TensorShape(shape, itemsize), dims, problem.mesh)
        )
    return tuple(tensors)


STEPS = _Steps()
