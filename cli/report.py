"""`attnops report`: one HTML page about a declared call or step: what is declared, planned, compiled, tuned and timed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..planning import Plan
from ..planning.paged.page_reads import sequence_reads
from ..planning.tune_cache import load
from ..planning.tuning import tune_key
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from ..verify.call import TargetReport
from ..verify.paged_step import StepReport
from .cache import plan_cache
from .call_arrays import call_shapes
from .ran_call import ran_call
from .report_data import Reported, Searched
from .report_page import report_page
from .report_step import ReportedStep, report_step_page
from .run_step import timed_step
from .step import is_paged, plan_step, refuse_inputs, step_of
from .target import HERE, TargetOptions, plan_metadata, targeted
from .verified import VerifyOptions, target_metadata
from .verify import verify_targets, why
from .version import version_text

__all__ = ["ReportOptions", "report"]


class ReportOptions(NamedTuple):
    """The options of `attnops report`."""

    declaration: Declaration
    targets: tuple[str, ...]
    inputs: Path | None
    mesh: str | None
    mode: str | None
    fallback: str | None
    lowered: bool
    timeout: float | None
    run: bool
    repeats: int
    seed: int
    output: Path
    notes: tuple[str, ...]


def report(options: ReportOptions) -> list[str]:
    """Write the page. Returns the targets and checks that fail."""
    if not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: {options.output.parent} is not a folder.")
    return _report_step(options) if is_paged(options.declaration) else _report_call(options)


def _report_call(options: ReportOptions) -> list[str]:
    declaration = options.declaration
    shapes = call_shapes(declaration, options.inputs)
    # Run on this machine first: once jax has started, no more virtual devices can be created.
    ran = None
    if options.run:
        ran = ran_call(
            declaration, options.inputs, options.mesh, options.mode, options.seed, options.repeats, checked=True
        )
    made = {target: _verified(options, target) for target in sorted(options.targets, key=lambda name: name != HERE)}
    targets = [made[target] for target in dict.fromkeys(options.targets)]
    plan = targets[0].plan if targets else _plan(options, shapes.arrays)
    plans = [(one.target, one.plan) for one in targets] or [("planned", plan)]
    plans += [] if ran is None else [("this machine", ran.plan)]
    searches = [found for name, one in plans for found in _searches(name, one)]
    notes = (*shapes.notes, *options.notes)
    found = Reported(declaration, plan, tuple(targets), tuple(searches), ran, notes, _made())
    _write(options.output, report_page(found))
    failed = [why(one) for one in targets if not one.outcome.accepted] + ([] if ran is None else ran.failures)
    return failed if targets or plan.implementation is not None else [plan.refusal(), *failed]


def _report_step(options: ReportOptions) -> list[str]:
    """The same for a step over pages."""
    declaration = options.declaration
    refuse_inputs(options.inputs)
    timed = None
    if options.run:
        timed = timed_step(declaration, options.mesh, options.mode, options.seed, options.repeats, checked=True)
    ordered = sorted(dict.fromkeys(options.targets), key=lambda name: name != HERE)
    made = {target: _verified_step(options, target) for target in ordered}
    targets = tuple(made[target] for target in dict.fromkeys(options.targets))
    planned = targeted(declaration, TargetOptions(mesh=options.mesh, fallback=options.fallback))
    metadata = plan_metadata(planned)
    plan = plan_step(planned, metadata, options.mode)
    # The whole cache, on the first target's devices: a compiled step has one layer of it.
    if options.targets:
        first = options.targets[0]
        metadata = target_metadata(declaration, _verify_options(options, first), first)
    cache = plan_cache(planned, metadata)
    assert cache is not None, "plan_step refuses a file without a cache"
    batch = tuple(sequence_reads(plan.problem, step_of(planned, metadata, options.mode)[1].batch))
    shown = targets[0].plan if targets else plan
    found = ReportedStep(declaration, shown, cache, batch, targets, timed, options.notes, _made())
    _write(options.output, report_step_page(found))
    failed = [why(one) for one in targets if not one.outcome.accepted] + ([] if timed is None else timed.failures)
    return failed if targets or plan.implementation is not None else [plan.refusal(), *failed]


def _made() -> str:
    return f"{version_text()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror or error}.") from None


def _verified(options: ReportOptions, target: str) -> TargetReport:
    (found,) = verify_targets(_verify_options(options, target))
    assert isinstance(found, TargetReport)
    return found


def _verified_step(options: ReportOptions, target: str) -> StepReport:
    (found,) = verify_targets(_verify_options(options, target))
    assert isinstance(found, StepReport)
    return found


def _verify_options(options: ReportOptions, target: str) -> VerifyOptions:
    return VerifyOptions(
        options.declaration,
        (target,),
        options.inputs,
        options.mesh,
        options.mode,
        options.fallback,
        options.lowered,
        options.timeout,
    )


def _plan(options: ReportOptions, arrays: dict[str, object]) -> Plan:
    """The plan of the declared call, without devices."""
    declaration = options.declaration
    declaration = targeted(declaration, TargetOptions(mesh=options.mesh, fallback=options.fallback))
    operation = OperationRegistry.get(declaration.operation)
    return operation(plan_metadata(declaration)).plan(**declaration.call_arguments(arrays, mode=options.mode))


def _searches(name: str, plan: Plan) -> list[Searched]:
    """The cached search results of a plan, by pass and by method of measuring."""
    if plan.runs is None or plan.method is None:
        return []
    kept = load(tune_key(plan.method, plan.problem, plan.placement)).measured
    found: list[Searched] = []
    offered = plan.runs.candidates(plan.problem, plan.placement) if kept else {}
    for part, how in dict.fromkeys((one.part, one.how) for one in kept):
        ones = [one for one in kept if (one.part, one.how) == (part, how)]
        good = sorted((one for one in ones if one.seconds), key=lambda one: one.seconds or 0.0)
        first = next(iter(offered.get(part, ())), None)
        heuristic = next((i for i, one in enumerate(good) if one.fields == first), None)
        if good:
            found.append(Searched(name, part, how, tuple(good), heuristic, len(ones) - len(good)))
    return found
