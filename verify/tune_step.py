"""tune_step: search the block sizes of a step over pages, by time here or by static clock elsewhere, and keep the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..devices import spec_of_kind
from ..errors import ConfigError, RefusedError
from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged.step_operation import StepOperation
from ..operators.paged.tpu_kernel import tpu_call
from ..planning.paged.page_reads import sequence_reads
from ..planning.paged.paged_plan import PagedPlan
from .drawn_step import draw_step, plan_declared
from .gpu.gpu_kernels import gpu_kernels
from .gpu_clock import GpuCost, step_cost
from .paged_clock import LocalStep, kernels_of_step, step_visits
from .paged_step import PlannedStep
from .search import MAX_CANDIDATES, Progress, Scheduled, Search, TuneReport, run_search
from .tune import measured_by

__all__ = ["tune_step"]


class _StepSearch(Search):
    """A declared step: its one pass, for the declared batch."""

    reads_gpu_code = True

    def __init__(self, operation: StepOperation, step: DeclaredStep, plan: PagedPlan, method: str) -> None:
        super().__init__(plan.operation, method, plan.problem, plan.placement)
        self.operation, self.step, self.runs = operation, step, plan.runs

    def program(self, part: str, fields: Mapping[str, Any]) -> Callable[[], Any]:
        """The pages are donated, and those of one run are the next one's."""
        drawn = draw_step(self._with(fields), self.step, 0)
        state, *others = drawn.arguments
        step = jax.jit(drawn.run, donate_argnums=0)

        def run() -> Any:
            nonlocal state
            output = step(state, *others)
            state = output.state
            return output

        return run

    def _with(self, fields: Mapping[str, Any]) -> StepOperation:
        """The operation with these sizes declared and no lookup, so that an empty choice means the rule's."""
        metadata, name = self.operation.metadata, self.operation.name
        config: Any = metadata.operation_configs.get(name) or self.operation.config.coerce({})
        configs = dict(metadata.operation_configs) | {name: config.with_fields(fields)}
        return type(self.operation)(metadata.replace(operation_configs=configs, tuning="off"))

    def gpu_cost(self, part: str, fields: dict[str, Any]) -> GpuCost:
        visits = self.runs.visits(self.problem, self.resolve(fields), self.step.batch)
        compiled = PlannedStep(self._with(fields), self.step).lowered("step").compile()
        return step_cost(
            self.device_kind, visits, gpu_kernels(compiled, compiled.as_text(), spec_of_kind(self.device_kind))
        )

    def scheduled(self, part: str, fields: dict[str, Any]) -> Scheduled:
        local = LocalStep(*tpu_call(self.problem, self.problem.config.with_fields(fields)))
        visits = step_visits(self.problem, local, self.step.batch)
        return Scheduled(local, {}, {name: visits[name].cycles for name in kernels_of_step(local)})


def tune_step(
    operation: StepOperation,
    step: DeclaredStep,
    *,
    how: str | None = None,
    most: int = MAX_CANDIDATES,
    progress: Progress | None = None,
) -> TuneReport:
    """Measure each candidate for the declared batch. Each measurement is stored as it is made and isn't repeated.

    how: 'device' times it with random values; 'static' compiles it for the TPU that it is planned for, and counts cycles. The
    default is 'device' if that is this machine's device. Errors: ConfigError if there is nothing to search or no way to measure;
    RefusedError.
    """
    plan = plan_declared(operation, step)
    if plan.method is None or plan.runs is None or plan.cache.refused:
        plan.require()
        raise RefusedError(plan.refusal())
    search = _StepSearch(operation, step, plan, plan.method)
    clock = measured_by(search, how)
    if clock == "static" and not plan.runs.static_clock:
        raise ConfigError(
            f"{plan.implementation} runs this step on {plan.problem.device}, and the static clock knows only the kernels for "
            "TPUs and Hopper; `attnops plan` says why they don't run."
        )
    if clock == "static" and not sequence_reads(plan.problem, step.batch):
        raise ConfigError(
            "the declared batch has no queries, so no cycles can be counted; declare q_lens of 1 or more."
        )
    if not any(search.candidates(clock).values()):
        raise ConfigError(
            f"{plan.implementation} has no sizes to search for this step: they are all declared, or it only writes."
        )
    return TuneReport(plan, clock, *run_search(search, clock, most, progress))
