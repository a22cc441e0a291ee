"""run_search: every candidate of a call's passes or of a step is compiled or timed, and each measurement is stored at once.

Off the device a candidate's seconds are static cycles at the device's clock, from a TPU's schedule (static_clock.py) or from the
stalls of a GPU's warps (gpu_clock.py): an estimate without waits for memory. On the device they are measured.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, ClassVar, NamedTuple

import jax

from ..errors import AttnOpsError
from ..planning import OperationConfig, PlannedOperation
from ..planning.text import fields_text
from ..planning.tune_cache import Measured, StoredSearch, best_of, keep, load, mark_refused
from ..planning.tuning import config_with
from .clock_worker import ClockWorker, Compiled
from .compiled import failure
from .generations import clock_rate
from .gpu_clock import GpuCost, same_splits
from .report import AnyPlan

__all__ = ["MAX_CANDIDATES", "Candidates", "Progress", "Scheduled", "Search", "Todo", "TuneReport", "run_search"]

MAX_CANDIDATES = 16  # candidates per pass
_REPEATS, _MIN_SECONDS = 5, 0.1

Progress = Callable[[int, int, str], None]
Candidates = dict[str, tuple[dict[str, Any], ...]]  # of each pass, the heuristic's own first
Todo = list[tuple[str, dict[str, Any]]]  # passes and fields


class TuneReport(NamedTuple):
    """A search: what was measured, the heuristic's own candidates first, and what is stored."""

    plan: AnyPlan
    how: str
    candidates: Candidates
    result: StoredSearch
    reused: int

    @property
    def best(self) -> dict[str, Measured]:
        """The fastest candidate of each pass."""
        return best_of(self.result.measured, self.how)

    def measured(self, part: str) -> list[Measured]:
        """This search's candidates of a pass, in order."""
        measured = {measurement.name: measurement for measurement in self.result.measured}
        names = [Measured(part, fields, self.how, None).name for fields in self.candidates[part]]
        return [measured[name] for name in names if name in measured]

    def heuristic(self, part: str) -> Measured:
        """The candidate that would run without a search."""
        return self.measured(part)[0]


class Scheduled(NamedTuple):
    """What is compiled for a candidate's static clock, with fields that it doesn't hold itself; for each of its kernels, the
    cycles of the whole pass by those that the compiler's schedule tells."""

    compiled: Compiled
    fields: Mapping[str, Any]
    kernels: dict[str, Callable[[Any], int]]


class Search(ABC):
    """What is searched: a method of a call or a step, for one device. key: what a measurement depends on. reads_gpu_code: whether
    its kernels' stalls can be counted from the code for a GPU."""

    reads_gpu_code: ClassVar[bool] = False

    def __init__(self, operation: type[PlannedOperation], method: str, problem: Any, placement: Any) -> None:
        self.kind, self.method, self.problem, self.placement = operation, method, problem, placement
        self.key = operation.planner.tune_key(method, problem, placement)
        self.device_kind: str = problem.device_kind

    def candidates(self, how: str) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """What is tried for each pass."""
        runs = self.kind.implementation(self.method, self.problem.config)
        offered = runs.candidates(self.problem, self.placement)
        if how == "static" and self.problem.platform == "cuda":
            return {part: same_splits(options) for part, options in offered.items()}
        return offered

    def resolve(self, fields: Mapping[str, Any]) -> OperationConfig:
        """The whole config with some fields. Errors: ConfigError if they are refused."""
        return config_with(self.kind, self.method, self.problem, self.placement, fields)

    @abstractmethod
    def program(self, part: str, fields: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that runs a candidate once, on this machine's device."""

    @abstractmethod
    def scheduled(self, part: str, fields: dict[str, Any]) -> Scheduled:
        """What is compiled for a candidate's static clock on a TPU."""

    def gpu_cost(self, part: str, fields: dict[str, Any]) -> GpuCost:
        """What a candidate's kernels cost by their stalls, compiled for a GPU. Raises what the compiler raises."""
        raise NotImplementedError

    def by_clock(self, todo: Todo) -> Iterator[Measured]:
        """Estimates as they are made."""
        if self.problem.platform != "cuda":
            yield from self._by_schedule(todo)
            return
        for part, fields in todo:
            yield _tried(part, fields, "static", self._by_stalls)

    def _by_stalls(self, part: str, fields: dict[str, Any]) -> Measured:
        """One that spills is refused, as is one that doesn't compile."""
        cost = self.gpu_cost(part, fields)
        detail = {"cycles": cost.stalls, "registers": cost.registers, "shared_bytes": cost.shared_bytes}
        return Measured(part, fields, "static", None if cost.spills else cost.seconds, cost.spills, detail)

    def _by_schedule(self, todo: Todo) -> Iterator[Measured]:
        """By a TPU's schedules; the parts take turns, so that different kernels compile in parallel."""
        workers: dict[str, ClockWorker] = {}
        lock = threading.Lock()

        def worker(kernel: str) -> ClockWorker:
            with lock:
                return workers.setdefault(kernel, ClockWorker(kernel))

        def one(part: str, fields: dict[str, Any]) -> Measured:
            compiled, more, kernels = self.scheduled(part, fields)
            cycles, vmem = 0, list[int | None]()
            for name, cycles_of in kernels.items():
                outcome = worker(name).ask(self.device_kind, compiled, part, more)
                if outcome.cycles is None:
                    return Measured(part, fields, "static", None, outcome.failure, {"lost": outcome.lost})
                cycles += cycles_of(outcome.cycles)
                vmem.append(outcome.vmem)
            detail = {"cycles": cycles, "vmem_bytes": None if None in vmem else max(used or 0 for used in vmem)}
            return Measured(part, fields, "static", cycles / clock_rate(self.device_kind), None, detail)

        pool = ThreadPoolExecutor(max(1, min(len(todo), os.cpu_count() or 1)))
        try:
            futures: list[Future[Measured]] = [pool.submit(one, part, fields) for part, fields in _in_turn(todo)]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for started in workers.values():
                started.close()

    def by_time(self, todo: Todo) -> Iterator[Measured]:
        """Median times, one candidate after the other: nothing else may run meanwhile."""

        def timed(part: str, fields: dict[str, Any]) -> Measured:
            return Measured(part, fields, "device", _median(self.program(part, fields)))

        for part, fields in todo:
            yield _tried(part, fields, "device", timed)


def _tried(part: str, fields: dict[str, Any], how: str, measure: Callable[[str, dict[str, Any]], Measured]) -> Measured:
    """A measurement, or why there is none."""
    try:
        return measure(part, fields)
    except AttnOpsError as error:
        return Measured(part, fields, how, None, str(error))
    except Exception as error:  # raised by the compiler or the device
        return Measured(part, fields, how, None, failure(error).message)


def run_search(
    search: Search, how: str, max_candidates: int, progress: Progress | None
) -> tuple[Candidates, StoredSearch, int]:
    """(candidates, what is stored, how many were measured before). Stored measurements aren't repeated."""
    candidates = {part: options[:max_candidates] for part, options in search.candidates(how).items()}
    mark_refused(search.key, search.resolve)
    stored = {measurement.name for measurement in load(search.key).measured if not measurement.detail.get("lost")}
    requested = [(part, fields) for part, options in candidates.items() for fields in options]
    todo = [(part, fields) for part, fields in requested if Measured(part, fields, how, None).name not in stored]
    reused = done = len(requested) - len(todo)
    tell = progress or (lambda done, of, what: None)
    tell(done, len(requested), "")
    for measurement in search.by_time(todo) if how == "device" else search.by_clock(todo):
        keep(search.key, [measurement])
        done += 1
        tell(done, len(requested), f"{measurement.part}: {fields_text(measurement.fields) or 'by rule'}")
    return candidates, keep(search.key, [], finished=how), reused


def _in_turn(todo: Todo) -> Todo:
    parts = [[item for item in todo if item[0] == part] for part in dict.fromkeys(part for part, _ in todo)]
    return [item for row in itertools.zip_longest(*parts) for item in row if item is not None]


def _median(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    durations: list[float] = []
    while len(durations) < _REPEATS or sum(durations) < _MIN_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(run())
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)
