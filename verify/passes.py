"""target_reports: the passes of a planned call, or of a planned step, compiled for a target one after the other."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..devices import vmem_of
from ..errors import AttnOpsError, ConfigError
from ..planning.text import bytes_text
from ..planning.traffic import Traffic
from ..sharding.mesh import devices_cores
from .collectives import Collective, collectives
from .compiled import Failure, failure, program_text
from .devices import DeviceLimits, compiles_here, device_limits, kernels_of_program, lowered_for, tracing_on, unheld
from .differences import differences
from .report import AnyPlan, KernelCycles, PassReport, TargetReport, refusals
from .search import Scheduled
from .static_cycles import static_cycles
from .targets import not_compiled

__all__ = ["Planned", "Work", "names_of_passes", "target_reports"]


class Work(NamedTuple):
    """A pass on one device. looped: the operations aren't the compiler's, and the bytes are unknown, because of loops."""

    flops: float
    bytes_moved: float
    looped: bool = False


def names_of_passes(mode: str) -> tuple[str, ...]:
    """The passes of a call: in mode train also that with its gradient."""
    return ("forward", "forward and backward") if mode == "__train__" else ("forward",)


class Planned(ABC):
    """A planned call or step, as programs to compile: which arrays each pass is lowered with, and what it has to do.

    names: of its passes. exact: whether float32 products keep full precision.
    """

    plan: AnyPlan
    mesh: Any
    names: tuple[str, ...]
    exact: bool = False

    @abstractmethod
    def traced(self, name: str) -> Any:
        """The program of a pass, traced with every array laid out as planned."""

    def lowered(self, name: str) -> Any:
        """The program of a pass, lowered for the plan's platform."""
        platform = self.plan.problem.platform
        with tracing_on(self.mesh, platform):
            return lowered_for(self.traced(name), platform)

    def laid_out(self, x: Any, spec: PartitionSpec) -> Any:
        """The shape of an array with its place on the mesh."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    @abstractmethod
    def flops(self, name: str) -> float:
        """The operations of a pass on one device, as attnops counts them."""

    def work(self, name: str, counted: Any, ends: int, loops: bool) -> Work:
        """counted: by the compiler, None if it doesn't count, as for GPUs. ends: bytes of arguments and outputs. loops: the
        program has loops, of which the compiler counts one turn."""
        if counted is not None and not loops:
            return Work(float(counted.get("flops", 0.0)), float(counted.get("bytes accessed", 0.0)))
        looped = counted is not None
        return Work(self.flops(name), 0.0 if looped else float(ends), looped)

    @abstractmethod
    def traffic(self, name: str) -> Traffic:
        """The least that a pass has to send."""

    def differences(self, required: Traffic, sent: tuple[Collective, ...]) -> tuple[str, ...]:
        """Where a program sends something else."""
        return differences(required, sent)

    def advice(self, name: str, failure: Failure, vmem_most: int) -> tuple[str | None, tuple[tuple[str, int], ...]]:
        """(what to declare so that a failed pass compiles, what its kernel holds), as far as that is known."""
        return None, ()

    def scheduled(self, name: str) -> Scheduled:
        """What is compiled for a pass's static clock on a TPU. Errors: ConfigError if its kernels' schedules can't be read, as by
        default."""
        raise ConfigError(f"no schedules of kernels of {self.plan.implementation} are read for the pass {name!r}.")

    def warnings(self, passes: tuple[PassReport, ...]) -> Iterator[str]:
        """What numbers of compiled passes don't say of other devices."""
        yield from ()


def target_reports(
    planned: Planned, target: str, *, lower_only: bool = False, cycles: bool = False
) -> Iterator[TargetReport]:
    """The report as it grows: with the plan, and then with one more pass each time. lower_only: as with an abstract mesh. cycles:
    of a TPU's kernels are read too, from their schedules."""
    plan, names = planned.plan, () if refusals(planned.plan) else planned.names
    problem = plan.problem
    tpu = problem.platform == "tpu"
    device = device_limits(problem.platform, problem.device_kind, devices_cores(planned.mesh))
    default, max_vmem = vmem_of(problem.device_kind)[:2] if tpu else (0, 0)
    field = None if plan.runs is None else plan.runs.memory_field
    limit = getattr(plan.config, field) if field and tpu and names else None
    warnings: tuple[str, ...] = ()
    if device is not None and limit is not None and limit > max_vmem:
        warnings = (
            f"vmem_limit_bytes={limit} ({bytes_text(limit)}) is more than {device.kind} has: the compiler takes "
            f"{bytes_text(max_vmem)} and doesn't say so",
        )
    report = TargetReport(target, plan, device, default, max_vmem, (), warnings, names, lower_only)
    yield report
    for name in names:
        done = _compiled(planned, device, name, max_vmem, lower_only)
        if cycles and tpu and done.compiled and done.failure is None:
            done = replace(done, cycles=tuple(_cycles(planned, name)))
        passes = (*report.passes, done)
        reported = (*warnings, *planned.warnings(passes))
        peak = max(pass_report.peak_bytes for pass_report in passes)
        if tpu and device is not None and peak > device.hbm_bytes:
            warning = f"{bytes_text(peak)} at the peak is more than the device's {bytes_text(device.hbm_bytes)} of HBM"
            reported = (*reported, warning)
        report = replace(report, passes=passes, warnings=reported)
        yield report


def _cycles(planned: Planned, name: str) -> Iterator[KernelCycles]:
    """Of the kernels of a pass that compiles."""
    try:
        scheduled = planned.scheduled(name)
    except ConfigError as error:
        yield KernelCycles("kernels", None, None, str(error))
    else:
        part = "backward" if "backward" in name else "forward"
        yield from static_cycles(scheduled, planned.plan.problem.device_kind, part)


def _compiled(planned: Planned, device: DeviceLimits | None, name: str, vmem_most: int, lower_only: bool) -> PassReport:
    """One pass, compiled, or lowered where it can't be or needn't be compiled."""
    problem = planned.plan.problem
    can_compile = compiles_here(planned.mesh, problem.platform) and not lower_only
    start = time.perf_counter()
    try:
        lowered = planned.lowered(name)
        if not can_compile:
            why = "only lowering was asked for" if lower_only else not_compiled(problem.platform)
            return PassReport(name, False, None, seconds=time.perf_counter() - start, uncompiled=why)
        compiled = lowered.compile()
    except AttnOpsError:
        raise
    except Exception as error:  # the compiler's error, of whatever class
        failed = failure(error)
        better, breakdown = planned.advice(name, failed, vmem_most)
        return PassReport(name, can_compile, failed, better, breakdown, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    text, memory, counted = program_text(compiled), compiled.memory_analysis(), compiled.cost_analysis()
    parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    peak = sum(parts) - memory.alias_size_in_bytes
    work = planned.work(name, counted, sum(parts[:2]), text is not None and " while(" in text)
    arithmetic, traffic = 0.0, 0.0
    if device is not None:
        arithmetic, traffic = device.roofline(work.flops, work.bytes_moved, problem.runtime_dtype, planned.exact)
    sent = None if text is None else collectives(text, {axis.name: axis.size for axis in problem.mesh})
    required = planned.traffic(name)
    return PassReport(
        name,
        True,
        unheld(problem.platform, device, peak),
        seconds=seconds,
        kernels=None if text is None else kernels_of_program(compiled, text, problem.platform, problem.device_kind),
        argument_bytes=parts[0],
        output_bytes=parts[1],
        temp_bytes=parts[2],
        alias_bytes=memory.alias_size_in_bytes,
        peak_bytes=peak,
        flops=work.flops,
        bytes_moved=work.bytes_moved,
        roofline_seconds=max(arithmetic, traffic),
        bound="" if device is None else "arithmetic" if arithmetic >= traffic else "HBM",
        intensity=work.flops / work.bytes_moved if work.bytes_moved else 0.0,
        collectives=sent,
        needs=required.needs,
        differences=() if sent is None else planned.differences(required, sent),
        unknown=required.unknown,
        looped=work.looped,
    )
