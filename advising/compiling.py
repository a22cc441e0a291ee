"""compile_best: compiles the best few candidates for the target, and refuses those that don't compile or fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..registry import OperationRegistry
from ..verify.passes import target_reports
from ..verify.report import TargetReport
from ..verify.targets import not_compiled
from .entries import Entry, Refusals
from .families import FAMILIES
from .machine import machine_of

__all__ = ["Progress", "compile_best"]

Progress = Callable[[int, int, str], None]


def compile_best(
    ranked: list[Entry],
    refused: Refusals,
    max_count: int,
    tell: Progress,
    notes: list[str],
) -> list[Entry]:
    """The candidates in their order, of which the first `max_count` compile, fit and send what was estimated.

    Those before them that don't compile or fit are refused, and those that send something else come last. So however many are
    compiled, the first is the same.
    """
    described = machine_of(ranked[0].candidate.target).described if ranked else None
    if not ranked or max_count < 1:
        return ranked
    if described is None:
        notes.append("nothing is compiled for virtual CPU devices; use `attnops verify` or `attnops run` for that")
        return ranked
    if not described.compiles:
        notes.append(not_compiled(described.platform, "nothing was compiled"))
        return ranked
    done, differing = list[Entry](), list[Entry]()
    while ranked and len(done) < max_count:
        entry, *ranked = ranked
        tell(len(done), max_count, f"compile {entry.candidate.where}")
        entry = replace(entry, compiled=_compile(entry))
        assert entry.compiled is not None
        failure = next((report.failure for report in entry.compiled.passes if report.failure), None)
        if failure is None:
            (differing if entry.differs else done).append(entry)
        else:
            refused.add(
                entry.candidate.kind,
                entry.candidate.operation,
                str(failure.memory),
                failure.message,
                entry.candidate.where,
            )
    tell(max_count, max_count, "")
    return done + ranked + differing


def _compile(entry: Entry) -> TargetReport:
    target = machine_of(entry.candidate.target).described
    assert target is not None
    kind: Any = OperationRegistry.get(entry.candidate.operation)
    mesh = target.described(entry.candidate.mesh)
    fields = {"platform": None, "backend": None, "mesh": mesh}
    operation = kind(entry.declaration.operation_metadata(fields))
    planned = FAMILIES[entry.declaration.family].planned(entry.declaration, operation)
    *_, report = target_reports(planned, entry.candidate.target)
    return report
