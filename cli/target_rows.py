"""What a compiler said of a target, as labelled lines: `attnops verify` prints them, and a report has them on its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from ..planning.text import bytes_text, seconds_text
from ..verify.collectives import Collective
from ..verify.devices import AnyKernelUse
from ..verify.report import KernelCycles, PassReport, TargetReport, refusals
from .kernel_lines import kernel_limits, kernel_lines

__all__ = ["about_target", "pass_rows", "remark_rows"]

Row = tuple[str, str | Text]


def about_target(report: TargetReport) -> str:
    """The devices, and what each has."""
    mesh = ",".join(axis.label for axis in report.plan.problem.mesh) or "none"
    if report.device is None:
        return f"mesh {mesh}"
    hbm = bytes_text(report.device.hbm_bytes)
    return f"{report.device.kind}, mesh {mesh}; a device has {hbm} of HBM, {kernel_limits(report)}"


def remark_rows(report: TargetReport) -> list[Row]:
    """What needs attention besides the passes."""
    refused = refusals(report.plan) if report.plan.implementation is not None else ()
    return [
        *(("refused", Text(reason, style="red")) for reason in refused),
        *(("warning", Text(warning, style="yellow")) for warning in report.warnings),
        *(("not checked", Text(what, style="yellow")) for what in report.unchecked),
    ]


def pass_rows(report: TargetReport, pass_report: PassReport, reported: Sequence[AnyKernelUse] = ()) -> Iterator[Row]:
    """A pass: what failed, or its kernels, what it sends, its memory and its work. reported: kernels already described."""
    if pass_report.failure is not None:
        fits = "doesn't compile" if not pass_report.peak_bytes else "compiles but doesn't fit"
        yield "failed", Text(f"{fits}: {pass_report.failure.message}", style="red")
        yield from (("held", f"counted: {bytes_text(size)} for {what}") for what, size in pass_report.held)
        if pass_report.advice is not None:
            yield "advice", pass_report.advice
        if not pass_report.peak_bytes:
            return
    elif not pass_report.compiled:
        if pass_report.seconds:
            yield "lowered", f"lowers in {pass_report.seconds:.1f} s"
        yield "compiled", f"not compiled: {pass_report.uncompiled}"
        return
    else:
        yield "compiled", f"compiles in {pass_report.seconds:.1f} s"
    yield from (("kernel", line) for line in kernel_lines(report, pass_report.kernels, reported))
    yield from (("cycles", _cycles(kernel)) for kernel in pass_report.cycles)
    if report.devices > 1 and pass_report.collectives is not None:
        yield from _sent_rows(pass_report.collectives, pass_report)
    memory = "memory" if report.device is None else "HBM"
    arguments, outputs, temporary = map(
        bytes_text, (pass_report.argument_bytes, pass_report.output_bytes, pass_report.temp_bytes)
    )
    parts = f"arguments {arguments}, outputs {outputs}, temporary {temporary}"
    yield "memory", f"{memory} per device: {parts}; {bytes_text(pass_report.peak_bytes)} at the peak"
    work = f"{pass_report.flops / 1e9:.4g} GFLOP"
    if pass_report.looped:
        work += " by attnops' count; bytes moved unknown, as XLA counts the body of a loop once"
    else:
        work += f", {bytes_text(pass_report.bytes_moved)} moved, {pass_report.intensity:.0f} operations per byte"
    bound = (
        f": at least {seconds_text(pass_report.roofline_seconds)}, bound by {pass_report.bound}"
        if pass_report.bound
        else ""
    )
    yield "work", work + bound


def _cycles(kernel: KernelCycles) -> str:
    if kernel.cycles is None or kernel.seconds is None:
        return f"{kernel.name}: cycles not known: {kernel.failure}"
    return f"{kernel.name}: {kernel.cycles:,} cycles by the schedule, {seconds_text(kernel.seconds)} without waits for memory"


def _sent_rows(collectives: Sequence[Collective], pass_report: PassReport) -> Iterator[Row]:
    """What the program sends between devices, and what it must send."""
    for sent in collectives:
        overlap = ", overlapped with work" if sent.overlapped else ""
        size = f"{sent.count} {sent.kind} of {bytes_text(sent.result_bytes)} over {'+'.join(sent.axes)}"
        yield "sent", f"{size}: {bytes_text(round(sent.sent_bytes))} sent per device{overlap}"
    if not collectives:
        yield "sent", "no collectives: nothing is sent between devices"
    for kind in dict.fromkeys(need.kind for need in pass_report.needs):
        needs = [need for need in pass_report.needs if need.kind == kind]
        parts = ", ".join(f"{need.what} {bytes_text(need.sent_bytes)}" for need in needs)
        yield "needed", f"needed by {kind}: {bytes_text(sum(need.sent_bytes for need in needs))} ({parts})"
    if pass_report.differences:
        yield from (("sent", Text(f"DIFFERS in {line}", style="red")) for line in pass_report.differences)
    elif not pass_report.unknown:
        yield "compared", "sends exactly what is needed" if pass_report.needs else "needs nothing to be sent"
