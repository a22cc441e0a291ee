"""Size search: every candidate of every pass is compiled or timed, and each measurement is stored at once.

Off the device a candidate's seconds are static cycles at the device's clock, from a TPU's schedule (static_clock.py) or from the
stalls of a GPU's warps (gpu_clock.py): an estimate without waits for memory. On the device they are measured.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from ..devices import gpu_specs, spec_of_kind
from ..distribution import with_extras
from ..errors import AttnOpsError, ConfigError, RefusedError, shown
from ..operators.ambient import ambient_platform
from ..planning import AttentionProblem, Implementation, OperationConfig, PassSizes, Placement, Plan, PlannedOperation
from ..planning.paged.paged_plan import PagedPlan
from ..planning.paged.paged_problem import PagedProblem
from ..planning.text import fields_text
from ..planning.tune_cache import Choice, Found, Measured, best_of, keep, load, withdraw
from ..planning.tuning import config_with, tune_key
from .clock_worker import ClockWorker
from .compiled import failure
from .generations import clock_rate, has_libtpu, topology_of
from .gpu.gpu_mesh import has_cuda_plugin
from .gpu.sass import disassembler
from .gpu_clock import compiled_kernels, gpu_cost, same_splits
from .local_call import LocalProblem
from .tile_counts import kernel_cycles

__all__ = ["MOST", "TuneReport", "measured_by", "readable_kernels", "tune_plan", "tune_problem"]

MOST = 16  # candidates per pass
_REPEATS, _LEAST_SECONDS = 5, 0.1

Progress = Callable[[int, int, str], None]


class TuneReport(NamedTuple):
    """A search: what was measured, the heuristic's own candidates first, and what is stored."""

    plan: Plan | PagedPlan
    how: str
    candidates: dict[str, tuple[dict[str, Any], ...]]
    found: Found
    reused: int

    @property
    def best(self) -> dict[str, Measured]:
        """The fastest candidate of each pass."""
        return best_of(self.found.measured, self.how)

    def measured(self, part: str) -> list[Measured]:
        """This search's candidates of a pass, in order."""
        kept = {one.name: one for one in self.found.measured}
        names = [Measured(part, fields, self.how, None).name for fields in self.candidates[part]]
        return [kept[name] for name in names if name in kept]

    def heuristic(self, part: str) -> Measured:
        """The candidate that would run without a search."""
        return self.measured(part)[0]


def tune_problem(
    operation: type[PlannedOperation], method: str, problem: AttentionProblem, placement: Placement
) -> Choice:
    """Search with the defaults, for a plan with tuning='tune'. Errors: ConfigError if nothing can be measured."""
    found = _search(operation, method, problem, placement, measured_by(problem, None), MOST, None)[1]
    if found.choice is None:
        raise ConfigError(f"{problem.describe()}: no candidate compiles or runs; `attnops tune` shows why.")
    return found.choice


def tune_plan(
    decided: Plan, *, how: str | None = None, most: int = MOST, progress: Progress | None = None
) -> TuneReport:
    """Search the sizes of a planned call.

    how: 'static' compiles for a described TPU or GPU, 'device' times on this machine; the default is 'device' if this machine is
    what the call is planned for. most: candidates per pass. progress is called with (done, of, what). Each measurement is stored
    as it is made and isn't repeated. Errors: ConfigError if there is nothing to search or no way to measure, RefusedError.
    """
    if decided.method is None:
        raise RefusedError(decided.refusal())
    problem = decided.problem
    operation = decided.operation
    if decided.runs is None or not decided.runs.tuned_fields(problem, decided.placement):
        raise ConfigError(
            f"{decided.implementation} has no sizes to search for this call: they are all declared, or its path has none, or "
            "queries or keys are split over devices."
        )
    way = measured_by(problem, how)
    candidates, found, reused = _search(operation, decided.method, problem, decided.placement, way, most, progress)
    return TuneReport(decided, way, candidates, found, reused)


def measured_by(problem: AttentionProblem | PagedProblem, how: str | None) -> str:
    """'device' or 'static', as asked or by what is here. Errors: ConfigError where neither is possible."""
    ours = ambient_platform(())
    kinds = ("", problem.platform, ours.device_kind)
    here = ours.serves(problem.platform) and problem.device_kind in kinds
    if how not in (None, "static", "device"):
        raise ConfigError(f"how={shown(how)}; wanted 'static' or 'device'.")
    if how == "device" and not here:
        raise ConfigError(
            f"planned for {problem.device}, and this machine has {ours.device_kind}; run it there, or search by "
            "static clock."
        )
    if how == "device" or (how is None and here):
        return "device"
    if problem.platform == "cuda" and isinstance(problem, AttentionProblem):
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


def _require_gpu_compiler(problem: AttentionProblem) -> None:
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


def _search(
    operation: type[PlannedOperation],
    method: str,
    problem: AttentionProblem,
    placement: Placement,
    how: str,
    most: int,
    progress: Progress | None,
) -> tuple[dict[str, tuple[dict[str, Any], ...]], Found, int]:
    local = LocalProblem.of(problem, placement)
    offered = operation.implementation(method, problem.config).candidates(problem, placement)
    if how == "static" and problem.platform == "cuda":
        offered = {part: same_splits(ways) for part, ways in offered.items()}
    candidates = {part: ways[:most] for part, ways in offered.items()}
    key = tune_key(method, problem, placement)
    withdraw(key, partial(config_with, operation, method, problem, placement))
    kept = {one.name for one in load(key).measured if not one.detail.get("lost")}
    asked = [(part, fields) for part, ways in candidates.items() for fields in ways]
    todo = [(part, fields) for part, fields in asked if Measured(part, fields, how, None).name not in kept]
    tell = progress or (lambda done, of, what: None)
    tell(len(asked) - len(todo), len(asked), "")
    done = len(asked) - len(todo)
    if how == "device":
        measured = _by_time(local, todo)
    else:
        clock = _by_stalls if problem.platform == "cuda" else _by_clock
        measured = clock(operation, method, problem, placement, local, todo)
    for one in measured:
        keep(key, [one])
        done += 1
        tell(done, len(asked), f"{one.part}: {fields_text(one.fields)}")
    return candidates, keep(key, [], finished=how), len(asked) - len(todo)


# -- by the compiler's schedule ----------------------------------------------------------------------------------------


def _by_clock(
    operation: type[PlannedOperation],
    method: str,
    problem: AttentionProblem,
    placement: Placement,
    local: LocalProblem,
    todo: list[tuple[str, dict[str, Any]]],
) -> Iterator[Measured]:
    """Measurements as they are made: the parts take turns, so that different kernels compile in parallel."""
    workers: dict[str, ClockWorker] = {}
    lock = threading.Lock()

    def worker(kernel: str) -> ClockWorker:
        with lock:
            return workers.setdefault(kernel, ClockWorker(kernel))

    def one(part: str, fields: dict[str, Any]) -> Measured:
        asked = replace(problem, config=problem.config.with_fields(fields))
        runs = operation.implementation(method, asked.config)
        config = runs.resolve(asked, placement)
        cycles, vmem = 0, list[int | None]()
        for name, kernel in readable_kernels(runs, config, part == "backward"):
            outcome = worker(name).ask(problem.device_kind, local, part, fields)
            if outcome.cycles is None:
                return Measured(part, fields, "static", None, outcome.failure, {"lost": outcome.lost})
            cycles += kernel_cycles(problem, placement, config, kernel, outcome.cycles)
            vmem.append(outcome.vmem)
        detail = {"cycles": cycles, "vmem_bytes": None if None in vmem else max(used or 0 for used in vmem)}
        return Measured(part, fields, "static", cycles / clock_rate(problem.device_kind), None, detail)

    pool = ThreadPoolExecutor(max(1, min(len(todo), os.cpu_count() or 1)))
    try:
        futures: list[Future[Measured]] = [pool.submit(one, part, fields) for part, fields in _in_turn(todo)]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for started in workers.values():
            started.close()


def readable_kernels(
    runs: Implementation[Any], config: OperationConfig, backward: bool
) -> tuple[tuple[str, PassSizes], ...]:
    """(name, kernel) of a pass. Errors: ConfigError if it has kernels whose schedule can't be read."""
    kernels = runs.passes(config, backward)
    named = tuple((kernel.kernel, kernel) for kernel in kernels if kernel.kernel is not None)
    if len(named) < len(kernels):
        raise ConfigError(f"{config.operation} has no kernels whose schedule can be read; time it on the device.")
    return named


def _in_turn(todo: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    parts = [[one for one in todo if one[0] == part] for part in dict.fromkeys(part for part, _ in todo)]
    return [one for row in itertools.zip_longest(*parts) for one in row if one is not None]


def _by_stalls(
    operation: type[PlannedOperation],
    method: str,
    problem: AttentionProblem,
    placement: Placement,
    local: LocalProblem,
    todo: list[tuple[str, dict[str, Any]]],
) -> Iterator[Measured]:
    """The GPU kernels of each candidate, compiled and read. One that spills is refused, as is one that doesn't compile."""
    for part, fields in todo:
        asked = replace(problem, config=problem.config.with_fields(fields))
        try:
            runs = operation.implementation(method, asked.config)
            config = runs.resolve(asked, placement)
            readable_kernels(runs, config, part == "backward")
            kernels = compiled_kernels(problem.device_kind, local, part, fields)
            cost = gpu_cost(problem, placement, config, part, kernels)
        except AttnOpsError as error:
            yield Measured(part, fields, "static", None, str(error))
        except Exception as error:  # raised by the compiler
            yield Measured(part, fields, "static", None, failure(error).message)
        else:
            detail = {"cycles": cost.stalls, "registers": cost.registers, "shared_bytes": cost.shared_bytes}
            yield Measured(part, fields, "static", None if cost.spills else cost.seconds, cost.spills, detail)


# -- by time -----------------------------------------------------------------------------------------------------------


def _by_time(local: LocalProblem, todo: list[tuple[str, dict[str, Any]]]) -> Iterator[Measured]:
    """Median times, one candidate after the other: nothing else may run meanwhile."""
    for part, fields in todo:
        try:
            seconds = _median(local, part, fields)
        except AttnOpsError as error:
            yield Measured(part, fields, "device", None, str(error))
        except Exception as error:  # raised by the compiler or the device
            yield Measured(part, fields, "device", None, failure(error).message)
        else:
            yield Measured(part, fields, "device", seconds)


def _median(local: LocalProblem, part: str, fields: dict[str, Any]) -> float:
    function, shapes = local.program(fields, part)
    arrays = local.arrays(shapes)
    run = jax.jit(function)
    jax.block_until_ready(run(arrays))
    taken: list[float] = []
    while len(taken) < _REPEATS or sum(taken) < _LEAST_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(run(arrays))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
