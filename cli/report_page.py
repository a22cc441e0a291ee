"""A report as one HTML page, without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.text import Text

from ..drawing.charts import Bar, Point, bars, curve, roofline
from ..drawing.html import code, document, folded, paragraph, pictures, rows, section, subsection, title
from ..planning.decision import WHY
from ..planning.text import bytes_text, fields_text, seconds_text
from ..verify.compiled import KernelUse
from ..verify.gpu.gpu_device import GpuDevice
from ..verify.gpu.gpu_kernels import GpuKernelUse
from ..verify.report import AnyPlan, PassReport, TargetReport
from ..verify.work import exact_products
from .outcomes import WORDS
from .ran import ran_rows
from .report_data import PageData, Searched
from .report_subject import batch, cache, mask
from .target_rows import about_target, pass_rows, remark_rows

__all__ = ["report_page"]

_REGISTERS = 255  # most registers per thread in NVIDIA's instruction set


def report_page(report: PageData) -> str:
    """The page as HTML."""
    described = report.plan.problem.describe()
    name = f"{described.partition(' on ')[0]}:{described.partition(':')[2].rpartition(', mesh')[0]}"
    kind = report.plan.subject
    targets = [(f"target-{n}", target) for n, target in enumerate(report.targets)]
    sections = [
        ("declaration", "Declaration", [code(report.declaration.to_json())]),
        *_subject(report),
        *([] if targets else [("plan", "Plan", [*_plan(report.plan), paragraph(_UNCOMPILED)])]),
        *((at, f"{target.target}: {WORDS[target.outcome]}", list(_target(target))) for at, target in targets),
        ("tuning", "Tuning", list(_tuning(report.searches, kind))),
        ("timings", "Timings", list(_timings(report, kind))),
        *([("notes", "Notes", [rows([("note", note) for note in report.notes])])] if report.notes else []),
    ]
    head = title(name, [(anchor, heading) for anchor, heading, _ in sections]) + paragraph(report.stamp)
    body = "".join(section(heading, parts, anchor) for anchor, heading, parts in sections)
    return document(f"attnops: {name}", head + body)


_UNCOMPILED = (
    "Nothing was compiled. --target v5e:2x2 or h100:8 compiles for devices elsewhere, --target here for this machine."
)


def _subject(report: PageData) -> list[tuple[str, str, list[str]]]:
    """The sections of a call's mask, or of a step's batch and its cache."""
    plan: Any = report.plan
    if plan.cache is None:
        return [] if plan.problem.declared_mask is None else [("mask", "Mask", list(mask(plan)))]
    sections = [("batch", "Batch", list(batch(plan, report.batch)))]
    return sections if report.cache is None else [*sections, ("cache", "Cache", list(cache(report.cache)))]


def _plan(plan: AnyPlan) -> Iterator[str]:
    """One screen of the plan, the whole plan folded, and where its tensors are."""
    runs = ("runs", f"{plan.implementation or 'nothing'} ({WHY[plan.kind]})")
    yield rows([runs, *plan.page_rows()])
    yield folded("The whole plan", code(plan.explain(verbose=True)))
    if (picture := plan.placement_picture()) is not None:
        yield subsection("Placement")
        yield pictures([picture.svg()])


def _lines(rows_of_pass: Iterable[tuple[str, str | Text]]) -> Iterator[str]:
    """Labelled lines. Those that are coloured in a terminal are warnings."""
    labelled = list(rows_of_pass)
    yield from (paragraph(f"{label}: {line.plain}", warns=True) for label, line in labelled if isinstance(line, Text))
    if plain := [(label, line) for label, line in labelled if not isinstance(line, Text)]:
        yield rows(plain)


def _target(report: TargetReport) -> Iterator[str]:
    yield paragraph(about_target(report))
    yield from _lines(remark_rows(report))
    yield from _plan(report.plan)
    for pass_report in report.passes:
        yield subsection(f"{pass_report.name[0].upper()}{pass_report.name[1:]}")
        pass_lines = list(pass_rows(report, pass_report))
        yield from _lines(row for row in pass_lines if row[0] not in ("held", "compared"))
        if pass_report.held:
            yield bars([Bar(what, size, bytes_text(size)) for what, size in pass_report.held])
        if pass_report.compiled and pass_report.peak_bytes:
            yield bars([*_memory(report, pass_report), *_sent(report, pass_report)])
        for kernel in dict.fromkeys(pass_report.kernels or ()):
            if isinstance(kernel, GpuKernelUse) and (lanes := list(_lanes(kernel))):
                yield paragraph(
                    f"What a tile of keys keeps each role of {kernel.name} busy with, in stall cycles of a warp:"
                )
                yield bars(lanes)
        yield from (paragraph(f"The program {line}.") for label, line in pass_lines if label == "compared")
    yield from _roofline(report)


def _memory(report: TargetReport, pass_report: PassReport) -> Iterator[Bar]:
    """HBM, and each kernel's use of VMEM, or of shared memory and registers."""
    limit = None if report.device is None else report.device.hbm_bytes
    of = "" if limit is None else f" of {bytes_text(limit)}"
    yield Bar("memory at the peak", pass_report.peak_bytes, f"{bytes_text(pass_report.peak_bytes)}{of}", limit)
    for kernel in dict.fromkeys(pass_report.kernels or ()):
        if isinstance(kernel, KernelUse):
            capacity = report.vmem_default if kernel.vmem_limit is None else kernel.vmem_limit
            if kernel.vmem_used is not None:
                text = f"{bytes_text(kernel.vmem_used)} of {bytes_text(capacity)} of VMEM"
                yield Bar(kernel.name, kernel.vmem_used, text, capacity)
        elif kernel.registers is not None:
            if kernel.shared_bytes is not None:
                capacity = report.device.shared_bytes if isinstance(report.device, GpuDevice) else kernel.shared_bytes
                text = f"{bytes_text(kernel.shared_bytes)} of {bytes_text(capacity)} of shared memory"
                yield Bar(kernel.name, kernel.shared_bytes, text, capacity)
            text = f"{kernel.registers} of {_REGISTERS} registers, {kernel.stack_bytes or 0} B spilled"
            yield Bar("" if kernel.shared_bytes is not None else kernel.name, kernel.registers, text, _REGISTERS)


def _lanes(kernel: GpuKernelUse) -> Iterator[Bar]:
    """The loops of a kernel whose warps have roles: a lane for each of those that compute, correct sums, convert and load."""
    if not kernel.loading and not kernel.sum_loops:
        return
    for gpu_loop in kernel.loops or ():
        loop = gpu_loop.loop
        text = f"{loop.stall_cycles}; {loop.tensor} products, {loop.ex2} exponentials"
        yield Bar("computes", loop.stall_cycles, text, good=True)
    for loop in kernel.sum_loops:
        yield Bar("corrects sums", loop.stall_cycles, str(loop.stall_cycles))
    for loop in kernel.converting:
        yield Bar("converts", loop.stall_cycles, str(loop.stall_cycles))
    for loop in kernel.loading:
        yield Bar("loads", loop.stall_cycles, f"{loop.stall_cycles}; {loop.copies} copies")


def _sent(report: TargetReport, pass_report: PassReport) -> Iterator[Bar]:
    """Collectives by kind, next to the least that the strategy must send."""
    if report.devices == 1 or pass_report.collectives is None:
        return
    for kind in dict.fromkeys([*(c.kind for c in pass_report.collectives), *(need.kind for need in pass_report.needs)]):
        sent = sum(c.sent_bytes for c in pass_report.collectives if c.kind == kind)
        min_bytes = sum(need.sent_bytes for need in pass_report.needs if need.kind == kind)
        yield Bar(f"{kind}: sent", sent, bytes_text(round(sent)))
        yield Bar(f"{kind}: the least", min_bytes, bytes_text(round(min_bytes)), good=True)


def _roofline(report: TargetReport) -> Iterator[str]:
    """Each pass on the roofline of the device's published rates."""
    rated = [pass_report for pass_report in report.passes if pass_report.roofline_seconds and pass_report.intensity]
    device, plan = report.device, report.plan
    if device is None or not rated:
        return
    exact = exact_products(plan)
    arithmetic, traffic = device.roofline(1.0, 1.0, plan.problem.runtime_dtype, exact)
    points = [
        Point(pass_report.name, pass_report.intensity, pass_report.flops / pass_report.roofline_seconds)
        for pass_report in rated
    ]
    yield subsection("Roofline")
    yield pictures([roofline(1 / arithmetic, 1 / traffic, points, device.kind)])


def _tuning(searches: Sequence[Searched], kind: str) -> Iterator[str]:
    if not searches:
        yield paragraph(f"The tuning cache has no search for this {kind}; attnops tune runs one.")
    drawn = []
    for search in searches:
        unit = "ms, measured" if search.how == "device" else "ms by static clock, an estimate"
        values = [(fields_text(m.fields) or "by rule", 1e3 * (m.seconds or 0.0)) for m in search.measured]
        drawn.append(curve(f"{search.target}, {search.part}", unit, values, 0, search.heuristic))
    yield pictures(drawn)
    for search in searches:
        candidates = [
            (f"{n + 1}", f"{fields_text(m.fields) or 'by rule'}: {seconds_text(m.seconds or 0.0)}")
            for n, m in enumerate(search.measured)
        ]
        failed = f"; {search.failed} more don't compile or run" if search.failed else ""
        yield folded(f"{search.target}, {search.part}: {len(candidates)} candidates{failed}", rows(candidates))


def _timings(report: PageData, kind: str) -> Iterator[str]:
    if report.ran is None:
        yield paragraph(f"The {kind} was not run; --run runs it.")
        return
    ran = report.ran
    first = ("runs", f"{ran.plan.implementation} on {ran.plan.problem.device}")
    yield rows([first, *((name, str(line)) for name, line in ran_rows(ran))])
    if ran.compared is not None and ran.compared.compiled is not None:
        both = zip(("attnops", "jax.nn.dot_product_attention"), ran.seconds, strict=False)
        yield bars([Bar(name, seconds, seconds_text(seconds)) for name, seconds in both])
    yield rows([("note", note) for note in ran.notes])
