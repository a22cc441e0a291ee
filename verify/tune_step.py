"""tune_step: search the block sizes of a step over pages, by time here or by static clock for a TPU, and keep the best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from ..errors import AttnOpsError, ConfigError, RefusedError
from ..operators.paged import PagedOperation
from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged.tpu_kernel import tpu_call
from ..planning.paged.page_reads import sequence_reads
from ..planning.paged.paged_problem import PagedProblem
from ..planning.paged.step_tuning import step_key
from ..planning.text import fields_text
from ..planning.tune_cache import Measured, keep, load, withdraw
from ..planning.tuning import config_with
from .clock_worker import ClockWorker, Outcome
from .compiled import failure
from .drawn_step import draw_step
from .generations import clock_rate
from .paged_clock import LocalStep, Visits, kernels_of_step, step_visits
from .tune import MOST, Progress, TuneReport, measured_by

__all__ = ["tune_step"]

_PART = "step"
_REPEATS, _LEAST_SECONDS = 5, 0.1


def tune_step(
    operation: PagedOperation,
    step: DeclaredStep,
    *,
    how: str | None = None,
    most: int = MOST,
    progress: Progress | None = None,
) -> TuneReport:
    """Measure each candidate for the declared batch. Each measurement is stored as it is made and isn't repeated.

    how: 'device' times it with random values; 'static' compiles it for the TPU that it is planned for, and counts cycles. The
    default is 'device' if that is this machine's device. Errors: ConfigError if there is nothing to search or no way to measure;
    RefusedError.
    """
    options = step.options | {"softmax_aux": step.sinks}
    plan = operation.plan(
        step.query, step.key, step.value, cache=step.cache, layer=step.layer, batch=step.batch, **options
    )
    if plan.method is None or plan.runs is None or plan.cache.refused:
        plan.require()
        raise RefusedError(plan.refusal())
    way = measured_by(plan.problem, how)
    if way == "static" and not plan.runs.static_clock:
        raise ConfigError(
            f"{plan.implementation} runs this step on {plan.problem.device}, and the static clock knows only the TPU kernels; "
            "`attnops plan` says why they don't run."
        )
    if way == "static" and not sequence_reads(plan.problem, step.batch):
        raise ConfigError(
            "the declared batch has no queries, so no cycles can be counted; declare q_lens of 1 or more."
        )
    candidates = plan.runs.candidates(plan.problem, None)[_PART][:most]
    if not candidates:
        raise ConfigError(
            f"{plan.implementation} has no sizes to search for this step: they are all declared, or it only writes."
        )
    key = step_key(plan.method, plan.problem)
    withdraw(key, partial(config_with, plan.operation, plan.method, plan.problem, plan.placement))
    kept = {one.name for one in load(key).measured if not one.detail.get("lost")}
    tell = progress or (lambda done, of, what: None)
    todo = [fields for fields in candidates if Measured(_PART, fields, way, None).name not in kept]
    done = len(candidates) - len(todo)
    tell(done, len(candidates), "")
    measured = _by_clock(plan.problem, step, todo) if way == "static" else (_timed(operation, step, f) for f in todo)
    for one in measured:
        keep(key, [one])
        done += 1
        tell(done, len(candidates), f"{_PART}: {fields_text(one.fields) or 'by rule'}")
    return TuneReport(plan, way, {_PART: candidates}, keep(key, [], finished=way), len(candidates) - len(todo))


def _by_clock(problem: PagedProblem, step: DeclaredStep, todo: list[dict[str, int]]) -> Iterator[Measured]:
    """Both kernels of a candidate compile at the same time, each in a process of its own."""
    workers: dict[str, ClockWorker] = {}
    try:
        for fields in todo:
            local = LocalStep(*tpu_call(problem, problem.config.with_fields(fields)))
            kernels = kernels_of_step(local)
            with ThreadPoolExecutor(len(kernels)) as pool:
                ask = lambda name: workers[name].ask(problem.device_kind, local, _PART, {})  # noqa: B023, E731
                for name in kernels:
                    workers.setdefault(name, ClockWorker(name))
                outcomes = dict(zip(kernels, pool.map(ask, kernels), strict=True))
            yield _estimate(problem, fields, outcomes, step_visits(problem, local, step.batch))
    finally:
        for worker in workers.values():
            worker.close()


def _estimate(
    problem: PagedProblem, fields: dict[str, int], outcomes: dict[str, Outcome], visits: dict[str, Visits]
) -> Measured:
    cycles = 0
    for name, outcome in outcomes.items():
        if outcome.cycles is None:
            return Measured(_PART, fields, "static", None, outcome.failure, {"lost": outcome.lost})
        cycles += visits[name].cycles(outcome.cycles)
    vmem = [outcome.vmem for outcome in outcomes.values()]
    detail = {"cycles": cycles, "vmem_bytes": None if None in vmem else max(used or 0 for used in vmem)}
    return Measured(_PART, fields, "static", cycles / clock_rate(problem.device_kind), None, detail)


def _timed(operation: PagedOperation, step: DeclaredStep, fields: dict[str, int]) -> Measured:
    try:
        return Measured(_PART, fields, "device", _median(_with(operation, fields), step))
    except AttnOpsError as error:
        return Measured(_PART, fields, "device", None, str(error))
    except Exception as error:  # raised by the compiler or the device
        return Measured(_PART, fields, "device", None, failure(error).message)


def _with(operation: PagedOperation, fields: dict[str, int]) -> PagedOperation:
    """The operation with these sizes declared and no lookup, so that an empty choice means the rule's."""
    metadata, name = operation.metadata, operation.name
    config: Any = metadata.operation_configs.get(name) or operation.config.coerce({})
    configs = dict(metadata.operation_configs) | {name: config.with_fields(fields)}
    return type(operation)(metadata.replace(operation_configs=configs, tuning="off"))


def _median(operation: PagedOperation, step: DeclaredStep) -> float:
    drawn = draw_step(operation, step, 0)
    state, *others = drawn.arguments
    run = jax.jit(drawn.run, donate_argnums=0)
    state = jax.block_until_ready(run(state, *others)).state
    taken: list[float] = []
    while len(taken) < _REPEATS or sum(taken) < _LEAST_SECONDS:
        start = time.perf_counter()
        made = jax.block_until_ready(run(state, *others))
        taken.append(time.perf_counter() - start)
        state = made.state
    return statistics.median(taken)
