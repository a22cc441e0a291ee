"""`attnops verify`: compile the declared call for TPUs that aren't here, and tell what the compiler says."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from rich.text import Text

from attnops.call_arrays import call_shapes
from attnops.cli_plan import brief_rows
from attnops.cli_target import declared_sizes
from attnops.cli_text import errors, fields, text
from attnops.errors import ShardingError
from attnops.registry import OperationRegistry
from attnops.registry.declaration import Declaration
from attnops.registry.explain import bytes_text
from attnops.sharding.mesh import AnyMesh
from attnops.verify.generations import abstract_target, has_libtpu
from attnops.verify.topology import described_mesh
from attnops.verify.tpu import PassReport, TargetReport, verify_call

__all__ = ["VerifyOptions", "print_reports", "target_mesh", "verify"]

NO_LIBTPU = (
    "libtpu isn't installed, so this was lowered and not compiled; pip install 'attnops[tpu]' (Linux) compiles it"
)


class VerifyOptions(NamedTuple):
    """The options of `attnops verify`."""

    config: Path
    targets: tuple[str, ...]
    inputs: Path | None
    mesh: str | None
    mode: str | None
    fallback: str | None


def verify(options: VerifyOptions) -> list[TargetReport]:
    """One report a target."""
    declaration = Declaration.load(options.config)
    kind = OperationRegistry.get(declaration.operation)
    arrays = call_shapes(declaration.call, options.inputs).arrays
    arguments = declaration.call_arguments(arrays, mode=options.mode)
    reports = []
    for target in options.targets:
        changes: dict[str, Any] = {
            "platform": None,
            "backend": None,
            "mesh": target_mesh(target, options.mesh, declaration),
        }
        if options.fallback is not None:
            changes["fallback"] = options.fallback
        operation = kind(declaration.operation_metadata(changes))
        console = errors()
        if console.is_terminal:
            with console.status(Text(f"compile for {target}")):
                reports.append(verify_call(operation, arguments, target))
        else:
            reports.append(verify_call(operation, arguments, target))
    return reports


def target_mesh(target: str, mesh: str | None, declaration: Declaration) -> AnyMesh:
    """The target's devices, arranged by --mesh, else as the config's mesh if that has as many, else along fsdp."""
    kind, count = abstract_target(target)
    sizes: Mapping[str, int] | None = declared_sizes(mesh, declaration)
    if sizes is not None and mesh is None and math.prod(sizes.values()) != count:
        sizes = None
    sizes = {"fsdp": count} if sizes is None else sizes
    if has_libtpu():
        return described_mesh(target, sizes)
    if math.prod(sizes.values()) != count:
        raise ShardingError(
            f"--mesh {mesh} has {math.prod(sizes.values())} devices and {target} has {count}; wanted as many."
        )
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device
    )


def print_reports(reports: list[TargetReport], notes: tuple[str, ...] = ()) -> None:
    """All of it, a paragraph a target; `notes` come last."""
    console = text()
    console.print(Text(reports[0].plan.problem.describe().partition(" on ")[0], style="bold"), end="")
    console.print(Text(":" + reports[0].plan.problem.describe().partition(":")[2].rpartition(", mesh")[0]))
    for report in reports:
        console.print("", fields(_rows(report)), sep="\n")
    if notes:
        console.print("", fields([("note", note) for note in notes]), sep="\n")


def _rows(report: TargetReport) -> list[tuple[str, str | Text]]:
    device, plan = report.device, report.plan
    word, style = ("passes", "bold green") if report.passed else ("FAILS", "bold red")
    mesh = ",".join(f"{axis.name}={axis.size}" for axis in plan.problem.mesh)
    about = (
        f"  {device.kind}, mesh {mesh}; a device has {bytes_text(device.hbm_bytes)} of HBM, a kernel "
        f"{bytes_text(report.vmem_default)} of VMEM by default and {bytes_text(report.vmem_most)} at most"
    )
    rows: list[tuple[str, str | Text]] = [(report.target, Text.assemble((word, style), about))]
    # What is dropped, and why, is the plan's to tell.
    rows += [row for row in brief_rows(plan) if row[0] != "dropped"]
    if any(not p.compiled for p in report.passes):
        rows.append(("note", NO_LIBTPU))
    rows += [("warning", Text(warning, style="yellow")) for warning in report.warnings]
    for one in report.passes:
        rows += _pass_rows(report, one)
    return rows


def _pass_rows(report: TargetReport, one: PassReport) -> list[tuple[str, str | Text]]:
    if one.failure is not None:
        rows: list[tuple[str, str | Text]] = [(one.name, Text(f"doesn't compile: {one.failure.message}", style="red"))]
        rows += [(one.name, f"counted: {bytes_text(size)} for {what}") for what, size in one.held]
        return rows if one.advice is None else [*rows, (one.name, one.advice)]
    if not one.compiled:
        return [(one.name, f"lowers in {one.seconds:.1f} s")]
    rows = [(one.name, f"compiles in {one.seconds:.1f} s")]
    if one.kernels is None:
        rows.append((one.name, "VMEM isn't known: this jaxlib can't read the program that libtpu made"))
    for kernel, times in collections.Counter(one.kernels or ()).items():
        used = "an unknown part" if kernel.vmem_used is None else bytes_text(kernel.vmem_used)
        limit = report.vmem_default if kernel.vmem_limit is None else kernel.vmem_limit
        rows.append(
            (one.name, f"{kernel.name}: {used} of {bytes_text(limit)} of VMEM{f', {times} times' if times > 1 else ''}")
        )
    for sent in one.collectives or ():
        apart = ", overlapped with work" if sent.overlapped else ""
        rows.append(
            (
                one.name,
                f"{sent.count} {sent.kind} of {bytes_text(sent.result_bytes)} over {sent.group} devices: "
                f"{bytes_text(round(sent.sent_bytes))} sent by a device{apart}",
            )
        )
    if one.collectives == () and len(report.plan.problem.mesh) and report.plan.problem.devices > 1:
        rows.append((one.name, "no collectives: nothing is sent between devices"))
    sizes = (one.argument_bytes, one.output_bytes, one.temp_bytes, one.peak_bytes)
    rows.append(
        (
            one.name,
            "HBM of a device: arguments {}, outputs {}, temporary {}; {} at the peak".format(*map(bytes_text, sizes)),
        )
    )
    rows.append(
        (
            one.name,
            f"{one.flops / 1e9:.4g} GFLOP, {bytes_text(one.bytes_moved)} moved, {one.intensity:.0f} operations a byte: at "
            f"least {_time(one.roofline_seconds)}, bound by {one.bound}",
        )
    )
    return rows


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
