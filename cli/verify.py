"""`attnops verify`: compile the declared call or step for TPUs or GPUs that aren't here, or for a mesh of virtual CPU devices,
and print what the compiler reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from ..planning.notes import is_info
from ..planning.text import bytes_text
from ..verify.devices import AnyKernelUse
from ..verify.outcome import Outcome
from ..verify.report import PassReport, TargetReport, refusals
from ..verify.targets import target_of
from .compile_process import verified_within
from .console import fields, seconds_text, text, title
from .kernel_lines import kernel_limits, kernel_lines
from .outcomes import STYLES, WORDS
from .plan import brief_rows, head_text
from .progress import bar
from .target import HERE
from .verified import VerifyOptions, verified

__all__ = ["print_reports", "verify_targets", "why"]


def verify_targets(options: VerifyOptions) -> list[TargetReport]:
    """One report per target. Without a target: one for this machine's devices, virtual ones if the mesh needs them."""
    targets = options.targets or (HERE,)
    for target in targets:
        if target != HERE:
            target_of(target)  # before anything is compiled for the others
    reports = []
    for target in targets:
        with bar(f"compile for {'this machine' if target == HERE else target}") as told:
            for report in _growing(options, target):
                told(*report.progress)
        reports.append(report)
    return reports


def _growing(options: VerifyOptions, target: str) -> Iterator[TargetReport]:
    if options.timeout is None or options.lowered:
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
    device, plan = report.device, report.plan
    word, style = WORDS[report.outcome], STYLES[report.outcome]
    mesh = ",".join(f"{axis.name}={axis.size}" for axis in plan.problem.mesh)
    about = f"  mesh {mesh or 'none'}"
    if device is not None:
        hbm = bytes_text(device.hbm_bytes)
        about = f"  {device.kind}, mesh {mesh or 'none'}; a device has {hbm} of HBM, {kernel_limits(report)}"
    rows: list[tuple[str, str | Text]] = [(report.target, Text.assemble((word, style), about))]
    rows += [*brief_rows(plan), *[("note", note) for note in plan.notes if not is_info(note)]]
    if plan.implementation is not None:
        rows += [("refused", Text(reason, style="red")) for reason in refusals(plan)]
    rows += [("warning", Text(warning, style="yellow")) for warning in report.warnings]
    rows += [("not checked", Text(what, style="yellow")) for what in report.unchecked]
    for before, one in zip((None, *report.passes), report.passes, strict=False):
        rows += _pass_rows(report, one, (before and before.kernels) or ())
    return rows


def _pass_rows(report: TargetReport, one: PassReport, told: Sequence[AnyKernelUse]) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = []
    if one.failure is not None:
        fits = "doesn't compile" if not one.peak_bytes else "compiles but doesn't fit"
        rows = [(one.name, Text(f"{fits}: {one.failure.message}", style="red"))]
        rows += [(one.name, f"counted: {bytes_text(size)} for {what}") for what, size in one.held]
        rows += [] if one.advice is None else [(one.name, one.advice)]
        if not one.peak_bytes:
            return rows
    elif not one.compiled:
        lowered = [(one.name, f"lowers in {one.seconds:.1f} s")] if one.seconds else []
        return [*lowered, (one.name, f"not compiled: {one.uncompiled}")]
    else:
        rows.append((one.name, f"compiles in {one.seconds:.1f} s"))
    rows += [(one.name, line) for line in kernel_lines(report, one.kernels, told)]
    rows += _sent_rows(report, one)
    memory = "memory" if report.device is None else "HBM"
    sizes = (one.argument_bytes, one.output_bytes, one.temp_bytes, one.peak_bytes)
    rows.append(
        (
            one.name,
            "{} per device: arguments {}, outputs {}, temporary {}; {} at the peak".format(
                memory, *map(bytes_text, sizes)
            ),
        )
    )
    work = f"{one.flops / 1e9:.4g} GFLOP"
    if one.looped:
        work += " by attnops' count; bytes moved unknown, as XLA counts the body of a loop once"
    else:
        work += f", {bytes_text(one.bytes_moved)} moved, {one.intensity:.0f} operations per byte"
    least = f": at least {seconds_text(one.roofline_seconds)}, bound by {one.bound}" if one.bound else ""
    return [*rows, (one.name, work + least)]


def _sent_rows(report: TargetReport, one: PassReport) -> list[tuple[str, str | Text]]:
    """What the program sends between devices, and what it must send."""
    if report.devices == 1 or one.collectives is None:
        return []
    rows: list[tuple[str, str | Text]] = []
    for sent in one.collectives:
        apart = ", overlapped with work" if sent.overlapped else ""
        rows.append(
            (
                one.name,
                f"{sent.count} {sent.kind} of {bytes_text(sent.result_bytes)} over {'+'.join(sent.axes)}: "
                f"{bytes_text(round(sent.sent_bytes))} sent per device{apart}",
            )
        )
    if not one.collectives:
        rows.append((one.name, "no collectives: nothing is sent between devices"))
    for kind in dict.fromkeys(need.kind for need in one.needs):
        needs = [need for need in one.needs if need.kind == kind]
        parts = ", ".join(f"{need.what} {bytes_text(need.sent_bytes)}" for need in needs)
        rows.append((one.name, f"needed by {kind}: {bytes_text(sum(need.sent_bytes for need in needs))} ({parts})"))
    if one.unknown:
        return rows
    if one.differences:
        rows += [(one.name, Text(f"DIFFERS in {line}", style="red")) for line in one.differences]
    else:
        rows.append((one.name, "sends exactly what is needed" if one.needs else "and nothing needs to be sent"))
    return rows
