"""The page of `attnops report` about a declared step over pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from rich.text import Text

from ..drawing.charts import Bar, Point, bars, roofline
from ..drawing.html import code, document, folded, paragraph, pictures, rows, section, subsection, title
from ..drawing.sequences import SequenceBar, sequences
from ..planning.cache.cache_plan import CachePlan, array_rows, fact_rows
from ..planning.decision import WHY
from ..planning.paged.page_reads import SequenceReads
from ..planning.paged.paged_plan import PagedPlan, step_rows, token_rows
from ..planning.text import bytes_text
from ..registry.declaration import Declaration
from ..verify.compiled import KernelUse
from ..verify.paged_step import StepReport
from .console import seconds_text
from .kernel_lines import kernel_lines
from .outcomes import WORDS
from .plan import rejected_rows
from .run_step import TimedStep, timed_step_rows

__all__ = ["ReportedStep", "report_step_page"]


class ReportedStep(NamedTuple):
    """All data of a page. plan: shown if there is no target and nothing was compiled. cache: of all layers."""

    declaration: Declaration
    plan: PagedPlan
    cache: CachePlan
    batch: tuple[SequenceReads, ...]
    targets: tuple[StepReport, ...]
    timed: TimedStep | None
    notes: tuple[str, ...]
    made: str


def report_step_page(found: ReportedStep) -> str:
    """The page as HTML."""
    described = found.plan.problem.describe()
    name = f"{described.partition(' on ')[0]}:{described.partition(':')[2].rpartition(', mesh')[0]}"
    targets = [(f"target-{n}", one) for n, one in enumerate(found.targets)]
    compiled = "Nothing was compiled. --target v5e:2x2 compiles for TPUs elsewhere, --target here for this machine."
    sections = [
        ("declaration", "Declaration", [code(found.declaration.to_json())]),
        ("batch", "Batch", list(_batch(found))),
        ("cache", "Cache", list(_cache(found.cache))),
        *([] if targets else [("plan", "Plan", [*_plan(found.plan), paragraph(compiled)])]),
        *((at, f"{one.target}: {WORDS[one.outcome]}", list(_target(one))) for at, one in targets),
        ("timings", "Timings", list(_timings(found.timed))),
        *([("notes", "Notes", [rows([("note", note) for note in found.notes])])] if found.notes else []),
    ]
    head = title(name, [(anchor, heading) for anchor, heading, _ in sections]) + paragraph(found.made)
    body = "".join(section(heading, parts, anchor) for anchor, heading, parts in sections)
    return document(f"attnops: {name}", head + body)


def _batch(found: ReportedStep) -> Iterator[str]:
    """What a layer of the step reads, sequence by sequence."""
    page, several = found.plan.problem.page_size, len({one.shard for one in found.batch}) > 1
    drawn = []
    for number, one in enumerate(found.batch):
        name = f"{number} on {one.shard}" if several else str(number)
        told = f"{one.queries} of {one.length}, {one.end_page - one.first_page} pages"
        drawn.append(SequenceBar(name, one.length, min(one.first_page * page, one.length), one.queries, told))
    yield paragraph("Each line: the step's own tokens, of all tokens of the sequence; the pages that a layer reads.")
    yield pictures([sequences(drawn)])
    if found.plan.reads is not None:
        yield rows([("reads", found.plan.reads.describe())])


def _cache(plan: CachePlan) -> Iterator[str]:
    yield paragraph(plan.describe())
    if plan.memory_limit is not None:
        told = f"{bytes_text(plan.bytes_per_device)} of {bytes_text(plan.memory_limit)}"
        yield bars([Bar("cache per device", plan.bytes_per_device, told, plan.memory_limit)])
    if plan.scalar_limit is not None:
        told = f"{bytes_text(plan.page_table_bytes)} of {bytes_text(plan.scalar_limit)} of scalar memory"
        yield bars([Bar("page table", plan.page_table_bytes, told, plan.scalar_limit)])
    yield rows(fact_rows(plan))
    yield folded("Arrays", rows([(row[0], ", ".join(row[1:])) for row in array_rows(plan)]))


def _plan(plan: PagedPlan) -> Iterator[str]:
    runs = ("runs", f"{plan.implementation or 'nothing'} ({WHY[plan.kind]})")
    notes = [("note", note) for note in plan.notes]
    yield rows([runs, *rejected_rows(plan), *step_rows(plan, verbose=False), *notes])
    yield rows(
        [
            ("tensor", f"{name}: {spec}, {shape} -> {local}, {size}")
            for name, spec, shape, local, size in token_rows(plan)
        ]
    )
    if math.prod(axis.size for axis in plan.problem.mesh) > 1:
        yield pictures([plan.draw().svg()])
    yield folded("The whole plan", code(plan.explain(verbose=True)))


def _target(report: StepReport) -> Iterator[str]:
    device, plan = report.device, report.plan
    if device is not None:
        yield paragraph(f"{device.kind}: {bytes_text(device.hbm_bytes)} of HBM per device")
    yield from _plan(plan)
    if plan.cache.refused:
        yield from (paragraph(str(reason), warns=True) for reason in plan.cache.refused)
    if report.failure is not None:
        fits = "compiles but doesn't fit" if report.argument_bytes else "doesn't compile"
        yield paragraph(f"{fits}: {report.failure.message}", warns=True)
        return
    if not report.compiled:
        yield paragraph(f"not compiled: {report.uncompiled}", warns=True)
        return
    yield from (paragraph(f"Not checked: {what}", warns=True) for what in report.unchecked)
    yield paragraph(f"compiles in {report.seconds:.1f} s")
    yield from _memory(report)
    yield from _sent(report)
    yield from _roofline(report)


def _memory(report: StepReport) -> Iterator[str]:
    limit = None if report.device is None else report.device.hbm_bytes
    of = "" if limit is None else f" of {bytes_text(limit)}"
    found = [Bar("memory at the peak", report.peak_bytes, f"{bytes_text(report.peak_bytes)}{of}", limit)]
    for kernel in dict.fromkeys(report.kernels or ()):
        if isinstance(kernel, KernelUse) and kernel.vmem_used is not None:
            most = report.vmem_default if kernel.vmem_limit is None else kernel.vmem_limit
            told = f"{bytes_text(kernel.vmem_used)} of {bytes_text(most)} of VMEM"
            found.append(Bar(kernel.name, kernel.vmem_used, told, most))
    yield bars(found)
    sizes = {"arguments": report.argument_bytes, "outputs": report.output_bytes, "temporary": report.temp_bytes}
    parts = [("bytes", f"{name} {bytes_text(size)}") for name, size in sizes.items()]
    yield rows([*parts, *(("kernel", line) for line in kernel_lines(report, report.kernels))])


def _sent(report: StepReport) -> Iterator[str]:
    """What devices send: only what merges the outputs of devices that share sequences."""
    if report.plan.problem.mesh and report.collectives == ():
        yield rows([("sent", "nothing is sent between devices")])
    for one in report.collectives or ():
        if one in report.unneeded:
            yield paragraph(f"Sends {one.count} {one.kind} that nothing needs.", warns=True)
        else:
            size = bytes_text(round(one.sent_bytes))
            yield rows(
                [("sent", f"{size} in {one.count} {one.kind} over {'+'.join(one.axes)}, to merge outputs by their lse")]
            )


def _roofline(report: StepReport) -> Iterator[str]:
    device, moved = report.device, report.page_bytes
    if device is None or not report.roofline_seconds or not moved:
        return
    arithmetic, traffic = device.roofline(1.0, 1.0, report.plan.problem.runtime_dtype, False)
    point = Point("step", report.flops / moved, report.flops / report.roofline_seconds)
    yield subsection("Roofline")
    yield pictures([roofline(1 / arithmetic, 1 / traffic, [point], device.kind)])
    least = f"at least {seconds_text(report.roofline_seconds)} per layer, bound by {report.bound}"
    yield rows([("step", f"{report.flops / 1e9:.4g} GFLOP, {bytes_text(moved)} of pages read: {least}")])


def _timings(timed: TimedStep | None) -> Iterator[str]:
    if timed is None:
        yield paragraph("The step was not run; --run runs it.")
        return
    first = ("runs", f"{timed.ran.plan.implementation} on {timed.ran.plan.problem.device}")
    lines = [(name, line.plain if isinstance(line, Text) else line) for name, line in timed_step_rows(timed)]
    yield rows([first, *lines, *(("note", note) for note in timed.ran.notes)])
