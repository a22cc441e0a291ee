"""`attnops tune`: search block sizes for the declared call, by static clock or on this machine's device, and cache them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.text import Text

from ..errors import ConfigError
from ..planning.text import bytes_text, fields_text
from ..planning.tune_cache import ENVIRONMENT, Measured
from ..registry.declaration import Declaration
from ..verify.search import TuneReport
from .console import fields, table, text, title
from .declared import declared
from .progress import ReportProgress, bar
from .target import HERE
from .verified import target_metadata

__all__ = ["TuneOptions", "print_tuned", "tune", "tuned_json"]


class TuneOptions(NamedTuple):
    """The options of `attnops tune`."""

    declaration: Declaration
    targets: tuple[str, ...]
    inputs: Path | None
    mesh: str | None
    mode: str | None
    how: str | None
    max_candidates: int
    cache: Path | None


def tune(options: TuneOptions) -> list[tuple[str, TuneReport]]:
    """(target, report) for each target, or for this machine's device if none is given."""
    if options.cache is not None:
        os.environ[ENVIRONMENT] = str(options.cache.absolute())
    declaration = options.declaration
    if options.how == "device" and {*options.targets} - {HERE}:
        raise ConfigError("--how device measures times on this machine; leave out --target or --how.")
    work = declared(declaration, options.inputs, options.mode)
    reports = []
    for target in options.targets or (HERE,):
        metadata = target_metadata(declaration, target, options.mesh)
        name = jax.devices()[0].device_kind if target == HERE else target
        how = options.how or ("device" if target == HERE else "static")
        with bar(name) as progress:
            reports.append((name, work.tune(metadata, how, options.max_candidates, _after(progress))))
    return reports


def _after(progress: ReportProgress) -> ReportProgress:
    """A search tells what it has measured, a bar what is being done."""
    return lambda done, of, what: progress(done, of, f"after {what}" if what else "")


def tuned_json(reports: list[tuple[str, TuneReport]]) -> list[dict[str, Any]]:
    """JSON-ready values."""
    return [
        {
            "target": target,
            "how": report.how,
            "implementation": report.plan.implementation,
            "device_kind": report.plan.problem.device_kind,
            "choice": None if report.result.choice is None else report.result.choice.fields,
            "kept_in": str(report.result.path),
            "reused": report.reused,
            "passes": {
                part: [
                    measurement._asdict() | {"chosen": measurement is report.best.get(part)}
                    for measurement in report.measured(part)
                ]
                for part in report.candidates
            },
        }
        for target, report in reports
    ]


def print_tuned(reports: list[tuple[str, TuneReport]], notes: tuple[str, ...] = ()) -> None:
    """Print a table for each target and pass, fastest first, and then `notes`."""
    console = text()
    for target, report in reports:
        problem = report.plan.problem
        console.print(title(problem.describe()))
        console.print(fields([("target", target), *_about(report)]))
        for part in report.candidates:
            console.print("", _table(report, part), sep="\n")
            if failures := _failures(report, part):
                console.print(fields(failures))
        console.print("", fields(_ending(report)), "", sep="\n")
    if notes:
        console.print(fields([("note", note) for note in notes]))


def _about(report: TuneReport) -> list[tuple[str, str | Text]]:
    if report.how == "device":
        word = f"measured here, on {jax.devices()[0].device_kind}: medians"
    elif report.plan.problem.platform == "cuda":
        word = (
            "by static clock: cycles for which warps stall in the compiler's schedule, an estimate that leaves out waits for "
            "memory and for tensor cores"
        )
    else:
        word = "by static clock: cycles of the compiler's schedule, an estimate that leaves out waits for memory"
    rows: list[tuple[str, str | Text]] = [("how", word)]
    rows.append(("ratio", "relative to the heuristic's choice"))
    return [*rows, ("reused", f"{report.reused} candidates measured before")] if report.reused else rows


def _table(report: TuneReport, part: str) -> Any:
    """The candidates that work, fastest first."""
    measured, heuristic = report.measured(part), report.heuristic(part)
    names = list(dict.fromkeys(name for measurement in measured for name in measurement.fields))
    rich_table = table(part, *names, *_FIGURES[_clock(report)], "ratio")
    for measurement in sorted(
        (measurement for measurement in measured if measurement.seconds),
        key=lambda measurement: measurement.seconds or 0.0,
    ):
        row = [
            "heuristic" if measurement is heuristic else "other",
            *(str(measurement.fields.get(name, "-")) for name in names),
        ]
        row += _figures(measurement, _clock(report))
        rich_table.add_row(
            *row, _ratio(measurement, heuristic), style="bold green" if measurement is report.best.get(part) else None
        )
    return rich_table


def _clock(report: TuneReport) -> str:
    """How its candidates were measured: 'device', or by the schedule for a 'tpu' or a 'cuda' GPU."""
    return "device" if report.how == "device" else report.plan.problem.platform


_FIGURES = {"device": ("time",), "tpu": ("cycles", "VMEM"), "cuda": ("stalls", "registers", "shared memory")}


def _figures(measurement: Measured, clock: str) -> list[str]:
    if clock == "device":
        return [f"{(measurement.seconds or 0.0) * 1e3:.3f} ms"]
    cycles = f"{measurement.detail['cycles']:,}"
    if clock == "cuda":
        return [cycles, str(measurement.detail["registers"]), bytes_text(measurement.detail["shared_bytes"])]
    vmem = measurement.detail["vmem_bytes"]
    return [cycles, "unknown" if vmem is None else bytes_text(vmem)]


def _failures(report: TuneReport, part: str) -> list[tuple[str, str | Text]]:
    failed = [measurement for measurement in report.measured(part) if measurement.seconds is None]
    return [("fails", f"{fields_text(measurement.fields)}: {measurement.failure}") for measurement in failed]


def _ratio(measurement: Measured, heuristic: Measured) -> str:
    if measurement.seconds is None or not heuristic.seconds:
        return "-"
    return f"{measurement.seconds / heuristic.seconds:.3f}"


def _ending(report: TuneReport) -> list[tuple[str, str | Text]]:
    choice = report.result.choice
    if choice is None:
        return [("chosen", Text("nothing: no candidate compiles", style="red"))]
    return [("chosen", Text(fields_text(choice.fields), style="green")), ("stored in", str(report.result.path))]
