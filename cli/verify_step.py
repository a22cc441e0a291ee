"""`attnops verify` for a declared step over pages: what the compiler reports for each target."""

from __future__ import annotations

from rich.text import Text

from ..planning.text import bytes_text
from ..verify.outcome import Outcome
from ..verify.paged_step import StepReport
from .console import fields, seconds_text, text, title
from .kernel_lines import kernel_lines
from .outcomes import STYLES, WORDS
from .plan import head_text, rejected_rows, runs_row

__all__ = ["print_step_reports", "why_step"]


def print_step_reports(reports: list[StepReport], notes: tuple[str, ...] = ()) -> None:
    """Print all reports, one paragraph per target, and then `notes`."""
    console = text()
    console.print(title(head_text(reports[0].plan.problem.describe())))
    for report in reports:
        console.print("", fields(_rows(report)), sep="\n")
    if notes:
        console.print("", fields([("note", note) for note in notes]), sep="\n")


def why_step(report: StepReport) -> str:
    """Why a target isn't accepted."""
    if report.plan.implementation is None:
        return f"{report.target}: {report.plan.refusal()}"
    if report.plan.cache.refused:
        return f"{report.target}: " + "; ".join(map(str, report.plan.cache.refused))
    if report.outcome is Outcome.NOT_COMPILED:
        return f"{report.target}: not compiled: {report.uncompiled}. Hint: --lowered asks for lowering alone."
    sent = [f"{found.count} {found.kind} that nothing needs" for found in report.unneeded]
    return f"{report.target}: " + "; ".join([*([] if report.failure is None else [report.failure.message]), *sent])


def _rows(report: StepReport) -> list[tuple[str, str | Text]]:
    device, plan = report.device, report.plan
    word, style = WORDS[report.outcome], STYLES[report.outcome]
    mesh = ",".join(f"{axis.name}={axis.size}" for axis in plan.problem.mesh) or "none"
    about = f"  mesh {mesh}"
    if device is not None:
        about = f"  {device.kind}, mesh {mesh}; a device has {bytes_text(device.hbm_bytes)} of HBM"
    rows: list[tuple[str, str | Text]] = [(report.target, Text.assemble((word, style), about))]
    rows += [runs_row(plan), *rejected_rows(plan), *[("note", note) for note in plan.notes]]
    rows += [("refused", Text(str(reason), style="red")) for reason in plan.cache.refused]
    if report.failure is not None:
        fits = "compiles but doesn't fit" if report.argument_bytes else "doesn't compile"
        return [*rows, ("step", Text(f"{fits}: {report.failure.message}", style="red"))]
    rows += [("not checked", Text(what, style="yellow")) for what in report.unchecked]
    if not report.compiled:
        rows += [("step", f"lowers in {report.seconds:.1f} s")] if report.seconds else []
        return [*rows, ("step", f"not compiled: {report.uncompiled}")] if report.uncompiled else rows
    rows.append(("step", f"compiles in {report.seconds:.1f} s"))
    rows += [("step", line) for line in kernel_lines(report, report.kernels)]
    if plan.cache.scalar_limit is not None:
        table = bytes_text(plan.cache.page_table_bytes)
        rows.append(("step", f"page table: {table} of {bytes_text(plan.cache.scalar_limit)} of scalar memory"))
    for sent in report.collectives or ():
        if sent in report.unneeded:
            rows.append(("step", Text(f"SENDS {sent.count} {sent.kind} that nothing needs", style="red")))
        else:
            size, over = bytes_text(round(sent.sent_bytes)), "+".join(sent.axes)
            rows.append(
                ("step", f"sends {size} in {sent.count} {sent.kind} over {over}, to merge outputs by their lse")
            )
    if report.collectives == () and plan.problem.mesh:
        rows.append(("step", "no collectives: nothing is sent between devices"))
    sizes = (report.argument_bytes, report.output_bytes, report.temp_bytes, report.peak_bytes)
    texts = tuple(map(bytes_text, sizes))
    rows.append(("step", "per device: arguments {}, outputs {}, temporary {}; {} at the peak".format(*texts)))
    if plan.reads is not None:
        work = f"{plan.reads.describe()}; {report.flops / 1e9:.4g} GFLOP"
        least = f": at least {seconds_text(report.roofline_seconds)}, bound by {report.bound}" if report.bound else ""
        rows.append(("reads", work + least))
    return rows
