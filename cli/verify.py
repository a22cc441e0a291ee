"""`attnops verify`: compile the declared call or step for TPUs or GPUs that aren't here, or for a mesh of virtual CPU devices,
and print what the compiler reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from ..planning.notes import is_info
from ..verify.outcome import Outcome
from ..verify.report import TargetReport, refusals
from ..verify.targets import gpu_capability, target_of
from .compile_process import verified_within
from .console import fields, text, title
from .outcomes import STYLES, WORDS
from .plan import brief_rows, head_text
from .progress import bar
from .target import HERE
from .target_rows import about_target, pass_rows, remark_rows
from .verified import VerifyOptions, verified

__all__ = ["print_reports", "verify_targets", "why"]


def verify_targets(options: VerifyOptions) -> list[TargetReport]:
    """One report per target. Without a target: one for this machine's devices, virtual ones if the mesh needs them."""
    targets = options.targets or (HERE,)
    for target in targets:
        if target != HERE:
            target_of(target)  # before anything is compiled for the others
    reports = []
    for number, target in enumerate(targets):
        before = {gpu_capability(earlier) for earlier in targets[:number]} - {None}
        alone = bool(before) and gpu_capability(target) not in (None, *before)
        with bar(f"compile for {'this machine' if target == HERE else target}") as progress:
            for report in _growing(options, target, alone):
                progress(*report.progress)
        reports.append(report)
    return reports


def _growing(options: VerifyOptions, target: str, alone: bool) -> Iterator[TargetReport]:
    """alone: in a process of its own, as Mosaic GPU compiles for one architecture in a process."""
    if options.lowered or (options.timeout is None and not alone):
        return verified(options, target)
    return verified_within(options, target, options.timeout)


def why(report: TargetReport) -> str:
    """Why a target isn't accepted."""
    if refused := refusals(report.plan):
        return f"{report.target}: {'; '.join(refused)}"
    if report.outcome is Outcome.NOT_COMPILED:
        reasons = dict.fromkeys(p.uncompiled for p in report.passes if p.uncompiled)
        return f"{report.target}: not compiled: {'; '.join(reasons)}. Hint: --lowered asks for lowering alone."
    failed = [f"{p.name}: {p.failure.message}" for p in report.passes if p.failure]
    differing = [f"{p.name}: {line}" for p in report.passes for line in p.differences]
    return f"{report.target}: " + "; ".join([*failed, *differing])


def print_reports(reports: Sequence[TargetReport], notes: tuple[str, ...] = ()) -> None:
    """Print all reports, one paragraph per target, and then `notes`."""
    console = text()
    console.print(title(head_text(reports[0].plan.problem.describe())))
    for report in reports:
        console.print("", fields(_rows(report)), sep="\n")
    if notes:
        console.print("", fields([("note", note) for note in notes]), sep="\n")


def _rows(report: TargetReport) -> list[tuple[str, str | Text]]:
    plan, word = report.plan, (WORDS[report.outcome], STYLES[report.outcome])
    rows: list[tuple[str, str | Text]] = [(report.target, Text.assemble(word, f"  {about_target(report)}"))]
    rows += [*brief_rows(plan), *[("note", note) for note in plan.notes if not is_info(note)]]
    rows += remark_rows(report)
    for before, current in zip((None, *report.passes), report.passes, strict=False):
        rows += [(current.name, line) for _, line in pass_rows(report, current, (before and before.kernels) or ())]
    return rows
