"""`attnops report`: one HTML page about a declared call or step: what is declared, planned, compiled, tuned and timed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..planning.paged.page_reads import sequence_reads
from ..planning.tune_cache import load
from ..verify.report import AnyPlan
from .cache import plan_cache
from .declared import declared
from .report_data import PageData, Searched
from .report_page import report_page
from .run import RunOptions, ran_declared
from .step import step_of
from .target import HERE, TargetOptions, plan_metadata, targeted
from .verified import VerifyOptions, target_metadata
from .verify import verify_targets, why
from .version import version_text

__all__ = ["ReportOptions", "report"]


class ReportOptions(NamedTuple):
    """The options of `attnops report`. verify: what is declared, and how it is compiled."""

    verify: VerifyOptions
    run: bool
    repeats: int
    seed: int
    output: Path
    notes: tuple[str, ...]


def report(options: ReportOptions) -> list[str]:
    """Write the page. Returns the targets and checks that fail."""
    if not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: {options.output.parent} is not a folder.")
    verify = options.verify
    declaration = verify.declaration
    work = declared(declaration, verify.inputs, verify.mode)
    # Run on this machine first: once jax has started, no more virtual devices can be created.
    ran = None
    if options.run:
        arguments = declaration, verify.inputs, None, verify.mesh, verify.mode
        ran = ran_declared(RunOptions(*arguments, seed=options.seed, check=True, repeats=options.repeats))
    ordered = tuple(sorted(dict.fromkeys(verify.targets), key=lambda name: name != HERE))
    by_target = dict(zip(ordered, verify_targets(verify._replace(targets=ordered)) if ordered else (), strict=True))
    targets = tuple(by_target[target] for target in dict.fromkeys(verify.targets))
    planned = targeted(declaration, TargetOptions(mesh=verify.mesh, fallback=verify.fallback))
    plan: Any = targets[0].plan if targets else work.plan(plan_metadata(planned))
    plans = [(target_report.target, target_report.plan) for target_report in targets] or [("planned", plan)]
    plans += [] if ran is None else [("this machine", ran.plan)]
    searches = [search for name, target_report in plans for search in _searches(name, target_report)]
    notes = (*work.notes, *options.notes)
    stamp = f"{version_text()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    reported = PageData(declaration, plan, targets, tuple(searches), ran, notes, stamp)
    if plan.cache is not None:
        # The cache of all layers, on the first target's devices: a compiled step has one layer of it.
        metadata = plan_metadata(planned)
        for target in verify.targets[:1]:
            metadata = target_metadata(declaration, target, verify.mesh, verify.fallback)
        _, step = step_of(planned, metadata, verify.mode)
        batch = tuple(sequence_reads(plan.problem, step.batch))
        reported = reported._replace(cache=plan_cache(planned, metadata), batch=batch)
    try:
        options.output.write_text(report_page(reported), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {error.strerror or error}.") from None
    failed = [why(target_report) for target_report in targets if not target_report.outcome.accepted] + (
        [] if ran is None else ran.failures
    )
    return failed if targets or plan.implementation is not None else [plan.refusal(), *failed]


def _searches(name: str, plan: AnyPlan) -> list[Searched]:
    """The cached search results of a plan, by pass and by method of measuring."""
    runs: Any = plan.runs
    if runs is None or plan.method is None:
        return []
    measured = load(plan.operation.planner.tune_key(plan.method, plan.problem, plan.placement)).measured
    offered = runs.candidates(plan.problem, plan.placement) if measured else {}
    searched: list[Searched] = []
    for part, how in dict.fromkeys((measurement.part, measurement.how) for measurement in measured):
        same_search = [measurement for measurement in measured if (measurement.part, measurement.how) == (part, how)]
        successful = sorted(
            (measurement for measurement in same_search if measurement.seconds),
            key=lambda measurement: measurement.seconds or 0.0,
        )
        first = next(iter(offered.get(part, ())), None)
        heuristic = next((i for i, measurement in enumerate(successful) if measurement.fields == first), None)
        if successful:
            searched.append(Searched(name, part, how, tuple(successful), heuristic, len(same_search) - len(successful)))
    return searched
