"""tune_step: search the block sizes of a step over pages by timing on this machine's device, and keep the best."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from ..errors import AttnOpsError, ConfigError, RefusedError
from ..operators.ambient import ambient_platform
from ..operators.paged import Paged
from ..operators.paged.declared_step import DeclaredStep
from ..planning.paged.step_tuning import step_candidates, step_key
from ..planning.text import fields_text
from ..planning.tune_cache import Measured, keep, load
from .compiled import failure
from .drawn_step import draw_step
from .tune import MOST, Progress, TuneReport

__all__ = ["tune_step"]

_PART = "step"
_REPEATS, _LEAST_SECONDS = 5, 0.1


def tune_step(
    operation: Paged, step: DeclaredStep, *, how: str | None = None, most: int = MOST, progress: Progress | None = None
) -> TuneReport:
    """Time each candidate on the declared batch with random values. Each measurement is stored as it is made and isn't repeated.

    Errors: ConfigError if there is nothing to search, or for a device that isn't here; RefusedError.
    """
    options = step.options | {"softmax_aux": step.sinks}
    plan = operation.plan(
        step.query, step.key, step.value, cache=step.cache, layer=step.layer, batch=step.batch, **options
    )
    if plan.method is None or plan.cache.refused:
        plan.require()
        raise RefusedError(plan.refusal())
    problem, ours = plan.problem, ambient_platform(())
    if how == "static" or not ours.serves(problem.platform):
        raise ConfigError(
            f"a step over pages is searched by timing on the device: it was planned for {problem.device}, and this machine has "
            f"{ours.device_kind}. Hint: leave out --target and --how static, or run it there."
        )
    candidates = step_candidates(problem)[:most]
    if not candidates:
        raise ConfigError(
            f"{plan.implementation} has no sizes to search for this step: they are all declared, or it only writes."
        )
    key = step_key(plan.method, problem)
    kept = {one.name for one in load(key).measured}
    tell = progress or (lambda done, of, what: None)
    todo = [fields for fields in candidates if Measured(_PART, fields, "device", None).name not in kept]
    done = len(candidates) - len(todo)
    tell(done, len(candidates), "")
    for fields in todo:
        keep(key, [_measured(operation, step, fields)])
        done += 1
        tell(done, len(candidates), f"{_PART}: {fields_text(fields) or 'by rule'}")
    found = keep(key, [], finished="device")
    return TuneReport(plan, "device", {_PART: candidates}, found, len(candidates) - len(todo))


def _measured(operation: Paged, step: DeclaredStep, fields: dict[str, int]) -> Measured:
    try:
        return Measured(_PART, fields, "device", _median(_with(operation, fields), step))
    except AttnOpsError as error:
        return Measured(_PART, fields, "device", None, str(error))
    except Exception as error:  # raised by the compiler or the device
        return Measured(_PART, fields, "device", None, failure(error).message)


def _with(operation: Paged, fields: dict[str, int]) -> Paged:
    """The operation with these sizes declared and no lookup, so that an empty choice means the rule's."""
    metadata, name = operation.metadata, operation.name
    config: Any = metadata.operation_configs.get(name) or operation.config.coerce({})
    configs = dict(metadata.operation_configs) | {name: config.with_fields(fields)}
    return type(operation)(metadata.replace(operation_configs=configs, tuning="off"))


def _median(operation: Paged, step: DeclaredStep) -> float:
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
