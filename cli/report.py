"""`attnops report`: one HTML page about a declared call: what is declared, planned, compiled, tuned and timed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..planning import Plan
from ..planning.tune_cache import load
from ..planning.tuning import tune_key
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from ..verify.call import TargetReport
from .call_arrays import call_shapes
from .ran_call import ran_call
from .report_data import Reported, Searched
from .report_page import report_page
from .step import is_paged
from .target import TargetOptions, plan_metadata, targeted
from .verify import HERE, VerifyOptions, verify, why
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
    run: bool
    repeats: int
    seed: int
    output: Path
    notes: tuple[str, ...]


def report(options: ReportOptions) -> list[str]:
    """Write the page. Returns the targets and checks that fail. Errors: ConfigError for steps over pages."""
    declaration = options.declaration
    if is_paged(declaration):
        raise ConfigError(
            f"operation {declaration.operation!r} runs steps over pages, but a report describes calls; use `attnops plan` or "
            "`attnops verify` for a step."
        )
    if not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: {options.output.parent} is not a folder.")
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
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    notes = (*shapes.notes, *options.notes)
    found = Reported(declaration, plan, tuple(targets), tuple(searches), ran, notes, f"{version_text()}, {when}")
    try:
        options.output.write_text(report_page(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {error.strerror or error}.") from None
    failed = [why(one) for one in targets if not one.passed] + ([] if ran is None else ran.failures)
    return failed if targets or plan.implementation is not None else [plan.refusal(), *failed]


def _verified(options: ReportOptions, target: str) -> TargetReport:
    names = () if target == HERE else (target,)
    (found,) = verify(
        VerifyOptions(options.declaration, names, options.inputs, options.mesh, options.mode, options.fallback)
    )
    assert isinstance(found, TargetReport), "a step over pages is refused before"
    return found


def _plan(options: ReportOptions, arrays: dict[str, object]) -> Plan:
    """The plan of the declared call, without devices."""
    declaration = options.declaration
    declaration = targeted(declaration, TargetOptions(mesh=options.mesh, fallback=options.fallback))
    operation = OperationRegistry.get(declaration.operation)
    return operation(plan_metadata(declaration)).plan(**declaration.call_arguments(arrays, mode=options.mode))


def _searches(name: str, plan: Plan) -> list[Searched]:
    """The cached search results of a plan, by pass and by method of measuring."""
    if plan.method is None:
        return []
    kept = load(tune_key(plan.method, plan.problem, plan.placement)).measured
    found: list[Searched] = []
    offered = plan.operation.candidates(plan.method, plan.problem, plan.placement) if kept else {}
    for part, how in dict.fromkeys((one.part, one.how) for one in kept):
        ones = [one for one in kept if (one.part, one.how) == (part, how)]
        good = sorted((one for one in ones if one.seconds), key=lambda one: one.seconds or 0.0)
        first = next(iter(offered.get(part, ())), None)
        heuristic = next((i for i, one in enumerate(good) if one.fields == first), None)
        if good:
            found.append(Searched(name, part, how, tuple(good), heuristic, len(ones) - len(good)))
    return found
