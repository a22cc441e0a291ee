"""`attnops verify`: compile the declared call for TPUs or GPUs that aren't here, or for a mesh of virtual CPU devices, and print
what the compiler reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from ..planning.text import Aside, bytes_text
from ..registry import OperationMetadata, OperationRegistry
from ..registry.declaration import Declaration
from ..sharding.mesh import AnyMesh
from ..verify.call import PassReport, TargetReport, verify_call
from ..verify.devices import AnyKernelUse
from ..verify.paged_step import StepReport
from ..verify.targets import not_compiled, target_of
from .call_arrays import call_shapes
from .console import fields, seconds_text, text, title
from .kernel_lines import kernel_limits, kernel_lines
from .plan import brief_rows, head_text
from .progress import bar
from .step import is_paged, refuse_inputs
from .target import declared_sizes, here, run_metadata
from .verify_step import print_step_reports, verify_steps, why_step

__all__ = ["VerifyOptions", "mesh_notes", "print_reports", "target_mesh", "target_metadata", "verify", "why"]

HERE = "here"


class VerifyOptions(NamedTuple):
    """The options of `attnops verify`."""

    declaration: Declaration
    targets: tuple[str, ...]
    inputs: Path | None
    mesh: str | None
    mode: str | None
    fallback: str | None


def verify(options: VerifyOptions) -> list[TargetReport] | list[StepReport]:
    """One report per target. Without a target: one for this machine's devices, virtual ones if the mesh needs them."""
    declaration = options.declaration
    if is_paged(declaration):
        refuse_inputs(options.inputs)
        return _verify_steps(declaration, options)
    kind: Any = OperationRegistry.get(declaration.operation)
    arrays = call_shapes(declaration, options.inputs).arrays
    arguments = declaration.call_arguments(arrays, mode=options.mode)
    reports = []
    for target in options.targets or (HERE,):
        metadata = target_metadata(declaration, options, target)
        name = _devices_here(metadata) if target is HERE else target
        with bar(f"compile for {name}") as told:
            reports.append(verify_call(kind(metadata), arguments, name, told))
    return reports


def _verify_steps(declaration: Declaration, options: VerifyOptions) -> list[StepReport]:
    targets = []
    for target in options.targets or (HERE,):
        metadata = partial(target_metadata, declaration, options, target)
        name = _devices_here(metadata()) if target is HERE else target
        targets.append((name, metadata))
    return verify_steps(declaration, targets, options.mode)


def target_metadata(declaration: Declaration, options: VerifyOptions, target: str) -> OperationMetadata:
    """The metadata on a target's mesh, whose devices are described or, for HERE, this machine's."""
    policy = {} if options.fallback is None else {"fallback": options.fallback}
    if target is HERE:
        return run_metadata(declaration, mesh=options.mesh).replace(**policy)
    mesh = target_mesh(target, options.mesh, declaration)
    return declaration.operation_metadata({"platform": None, "backend": None, "mesh": mesh, **policy})


def _devices_here(metadata: OperationMetadata) -> str:
    platform, _ = here()
    count = 1 if metadata.mesh is None else metadata.mesh.size
    return f"{count} {platform} device{'s' if count > 1 else ''}"


def target_mesh(target: str, mesh: str | None, declaration: Declaration) -> AnyMesh:
    """The target's devices, arranged by --mesh, else by the config's mesh if its size matches, else along fsdp."""
    wanted = target_of(target)
    sizes: Mapping[str, int] | None = declared_sizes(mesh, declaration)
    if sizes is not None and mesh is None and math.prod(sizes.values()) != wanted.count:
        sizes = None
    return wanted.mesh({"fsdp": wanted.count} if sizes is None else sizes)


def mesh_notes(declaration: Declaration, mesh: str | None, targets: Sequence[str]) -> tuple[str, ...]:
    """A note for each target whose devices the declared mesh can't be, so that another is used."""
    sizes = declared_sizes(mesh, declaration)
    if mesh is not None or sizes is None:
        return ()
    declared = ",".join(f"{name}={size}" for name, size in sizes.items())
    counts = {target: target_of(target).count for target in targets if target != HERE}
    return tuple(
        f"the declared mesh {declared} is not used: it has {math.prod(sizes.values())} devices, {target} has {count}. "
        "--mesh says how to arrange them; without it all are along fsdp"
        for target, count in counts.items()
        if count != math.prod(sizes.values())
    )


def why(report: TargetReport | StepReport) -> str:
    """Why a target fails."""
    if isinstance(report, StepReport):
        return why_step(report)
    if report.plan.implementation is None:
        return f"{report.target}: {report.plan.refusal()}"
    failed = [f"{p.name}: {p.failure.message}" for p in report.passes if p.failure]
    differing = [f"{p.name}: {line}" for p in report.passes for line in p.differences]
    return f"{report.target}: " + "; ".join([*failed, *differing])


def print_reports(reports: Sequence[TargetReport] | Sequence[StepReport], notes: tuple[str, ...] = ()) -> None:
    """Print all reports, one paragraph per target, and then `notes`."""
    if isinstance(reports[0], StepReport):
        print_step_reports([report for report in reports if isinstance(report, StepReport)], notes)
        return
    _print_reports([report for report in reports if isinstance(report, TargetReport)], notes)


def _print_reports(reports: list[TargetReport], notes: tuple[str, ...]) -> None:
    console = text()
    console.print(title(head_text(reports[0].plan.problem.describe())))
    for report in reports:
        console.print("", fields(_rows(report)), sep="\n")
    if notes:
        console.print("", fields([("note", note) for note in notes]), sep="\n")


def _rows(report: TargetReport) -> list[tuple[str, str | Text]]:
    device, plan = report.device, report.plan
    word, style = ("passes", "bold green") if report.passed else ("FAILS", "bold red")
    mesh = ",".join(f"{axis.name}={axis.size}" for axis in plan.problem.mesh)
    about = f"  mesh {mesh or 'none'}"
    if device is not None:
        hbm = bytes_text(device.hbm_bytes)
        about = f"  {device.kind}, mesh {mesh or 'none'}; a device has {hbm} of HBM, {kernel_limits(report)}"
    rows: list[tuple[str, str | Text]] = [(report.target, Text.assemble((word, style), about))]
    rows += [*brief_rows(plan), *[("note", note) for note in plan.notes if not isinstance(note, Aside)]]
    if any(not p.compiled for p in report.passes):
        rows.append(("note", not_compiled(plan.problem.platform)))
    rows += [("warning", Text(warning, style="yellow")) for warning in report.warnings]
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
        return [(one.name, f"lowers in {one.seconds:.1f} s")]
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
    if report.plan.problem.devices == 1 or one.collectives is None:
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
        rows += [(one.name, f"not compared with what is needed: {why}") for why in one.unknown]
    elif one.differences:
        rows += [(one.name, Text(f"DIFFERS in {line}", style="red")) for line in one.differences]
    else:
        rows.append((one.name, "sends exactly what is needed" if one.needs else "and nothing needs to be sent"))
    return rows
