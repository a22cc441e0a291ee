"""tune_plan: search the block sizes of a planned call, by time here or by static clock, and keep the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax

from ..devices import gpu_specs, spec_of_kind
from ..distribution import with_extras
from ..errors import ConfigError, RefusedError, shown
from ..operators.call.current_device import current_device
from ..planning import AttentionProblem, Implementation, OperationConfig, PassSizes, Placement, Plan, PlannedOperation
from ..planning.problem import Problem
from ..planning.tables.table_plan import TablePlan
from ..planning.tables.table_problem import TableProblem
from ..planning.tune_cache import Choice
from .generations import has_libtpu, topology_of
from .gpu.gpu_mesh import has_cuda_plugin
from .gpu.sass import disassembler
from .gpu_clock import GpuCost, compiled_kernels, gpu_cost
from .local_call import LocalProblem
from .search import MAX_CANDIDATES, Progress, Scheduled, Search, TuneReport, run_search
from .tile_counts import kernel_cycles
from .tune_recurrence import RecurrenceSearch

__all__ = ["measured_by", "readable_kernels", "scheduled_call", "search_of", "tune_plan", "tune_problem"]


class _CallSearch(Search):
    """The passes of a call."""

    reads_gpu_code = True

    def __init__(
        self, operation: type[PlannedOperation], method: str, problem: AttentionProblem, placement: Placement
    ) -> None:
        super().__init__(operation, method, problem, placement)
        self.local = LocalProblem.of(problem, placement)

    def program(self, part: str, fields: Mapping[str, Any]) -> Callable[[], Any]:
        function, shapes = self.local.program(fields, part)
        return partial(jax.jit(function), self.local.arrays(shapes))

    def scheduled(self, part: str, fields: dict[str, Any]) -> Scheduled:
        config, kernels = self._kernels(part, fields)
        counted = partial(kernel_cycles, self.problem, self.placement, config)
        return Scheduled(self.local, fields, {name: partial(counted, kernel) for name, kernel in kernels})

    def _kernels(self, part: str, fields: dict[str, Any]) -> tuple[OperationConfig, tuple[tuple[str, PassSizes], ...]]:
        """(the candidate's whole config, its kernels)."""
        candidate = replace(self.problem, config=self.problem.config.with_fields(fields))
        runs = self.kind.implementation(self.method, candidate.config)
        config = runs.resolve(candidate, self.placement)
        return config, readable_kernels(runs, config, part == "backward")

    def gpu_cost(self, part: str, fields: dict[str, Any]) -> GpuCost:
        config, passes = self._kernels(part, fields)
        kernels = compiled_kernels(self.device_kind, self.local, part, fields)
        return gpu_cost(self.problem, self.placement, config, tuple(size for _, size in passes), kernels)


def tune_problem(
    operation: type[PlannedOperation], method: str, problem: AttentionProblem | TableProblem, placement: Any
) -> Choice:
    """Search with the defaults, for a plan with tuning='tune'. Errors: ConfigError if nothing can be measured."""
    search = _SEARCHES[operation.family](operation, method, problem, placement)
    search_result = run_search(search, measured_by(search, None), MAX_CANDIDATES, None)[1]
    if search_result.choice is None:
        raise ConfigError(f"{problem.describe()}: no candidate compiles or runs; `attnops tune` shows why.")
    return search_result.choice


_SEARCHES: dict[str, type[Search]] = {"attention": _CallSearch, "recurrence": RecurrenceSearch}


def search_of(decided: Plan | TablePlan) -> Search:
    """What is searched of a planned call. Errors: RefusedError if nothing runs it."""
    if decided.method is None:
        raise RefusedError(decided.refusal())
    return _SEARCHES[decided.operation.family](decided.operation, decided.method, decided.problem, decided.placement)


def scheduled_call(decided: Plan, part: str) -> Scheduled:
    """What is compiled for the static clock of a planned call's pass on a TPU. Errors: ConfigError if it can't be read."""
    assert decided.method is not None
    return _CallSearch(decided.operation, decided.method, decided.problem, decided.placement).scheduled(part, {})


def tune_plan(
    decided: Plan | TablePlan, *, how: str | None = None, most: int = MAX_CANDIDATES, progress: Progress | None = None
) -> TuneReport:
    """Search the sizes of a planned call.

    how: 'static' compiles for a described TPU or GPU, 'device' times on this machine; the default is 'device' if this machine is
    what the call is planned for. most: candidates per pass. progress is called with (done, of, what). Each measurement is stored
    as it is made and isn't repeated. Errors: ConfigError if there is nothing to search or no way to measure, RefusedError.
    """
    if decided.method is None:
        raise RefusedError(decided.refusal())
    problem, runs = decided.problem, cast(Any, decided.runs)
    if runs is None or not runs.tuned_fields(problem, decided.placement):
        raise ConfigError(
            f"{decided.implementation} has no sizes to search for this call: they are all declared, or its path has none, or "
            "queries or keys are split over devices."
        )
    search = search_of(decided)
    clock = measured_by(search, how)
    return TuneReport(decided, clock, *run_search(search, clock, most, progress))


def measured_by(search: Search, how: str | None) -> str:
    """'device' or 'static', as asked or by what is here. Errors: ConfigError where neither is possible."""
    problem, device = search.problem, current_device(())
    kinds = ("", problem.platform, device.device_kind)
    is_planned_device = device.serves(problem.platform) and problem.device_kind in kinds
    if how not in (None, "static", "device"):
        raise ConfigError(f"how={shown(how)}; wanted 'static' or 'device'.")
    if how == "device" and not is_planned_device:
        raise ConfigError(
            f"planned for {problem.device}, and this machine has {device.device_kind}; run it there, or search by "
            "static clock."
        )
    if how == "device" or (how is None and is_planned_device):
        return "device"
    if problem.platform == "cuda" and search.reads_gpu_code:
        _require_gpu_compiler(problem)
        return "static"
    if how is None and problem.platform != "tpu":
        raise ConfigError(
            f"planned for {problem.device}, whose sizes are searched by timing: run it on such a device. Off the device, only "
            "compilers' schedules for TPUs and for the attention kernels of NVIDIA's GPUs can be read."
        )
    topology_of(problem.device_kind)  # raises for what can't be described
    if not has_libtpu():
        raise ConfigError(
            f"searching for {problem.device} off the device needs libtpu, which isn't installed; pip install "
            f"'{with_extras('tpu')}'."
        )
    return "static"


def _require_gpu_compiler(problem: Problem) -> None:
    if spec_of_kind(problem.device_kind) is None:
        kinds = ", ".join(spec.kind for spec in gpu_specs().values())
        raise ConfigError(
            f"planned for {problem.device}, which isn't a GPU that can be described: {kinds}. Run the search on the device."
        )
    if not has_cuda_plugin() or disassembler() is None:
        raise ConfigError(
            f"searching for {problem.device} off the device needs jax's CUDA plugin and nvdisasm; pip install "
            f"'{with_extras('cuda-compile', 'cuda-sass')}'."
        )


def readable_kernels(
    runs: Implementation[Any], config: OperationConfig, backward: bool
) -> tuple[tuple[str, PassSizes], ...]:
    """(name, kernel) of a pass. Errors: ConfigError if it has kernels whose schedule can't be read."""
    kernels = runs.passes(config, backward)
    named = tuple((kernel.kernel, kernel) for kernel in kernels if kernel.kernel is not None)
    if len(named) < len(kernels):
        raise ConfigError(f"{config.operation} has no kernels whose schedule can be read; time it on the device.")
    return named
