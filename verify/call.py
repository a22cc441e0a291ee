"""verify_call: compile a planned call for described devices or for those of this machine; report whether it fits, its memory and
its traffic. call_reports: the same, planned first, then one pass after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ..devices import vmem_of
from ..errors import AttnOpsError
from ..operators import Operation
from ..planning import Plan
from ..planning.placed_tensors import sent_itemsize
from ..planning.text import bytes_text
from ..planning.traffic import Need, least_traffic
from ..sharding.mesh import devices_cores
from .advice import advice, held
from .call_program import call_program
from .collectives import Collective, collectives
from .compiled import Failure, failure, program_text
from .devices import (
    AnyKernelUse,
    DeviceLimits,
    compiles_here,
    device_limits,
    kernels_of_program,
    lowered_for,
    tracing_on,
    unheld,
)
from .differences import differences
from .outcome import Outcome, outcome_of
from .targets import not_compiled
from .work import attention_flops, exact_products

__all__ = ["PassReport", "TargetReport", "call_reports", "verify_call"]

_UNREAD = "this jaxlib can't read programs of this libtpu"


@dataclass(frozen=True)
class PassReport:
    """One pass, per device. Bytes and operations are the compiler's counts. For GPUs the compiler counts neither: operations are
    attnops' count, and bytes are those of arguments and outputs, each once.

    compiled: False where the pass was only lowered, or where compiling was given up; `uncompiled` says why. failure: why it
    didn't compile, or doesn't fit though it compiled. held: what the failed kernel holds in VMEM, as (what, bytes), largest
    first, by attnops' count. kernels, collectives: None where the compiled program's text can't be read. roofline_seconds: the
    longer of arithmetic and HBM traffic at the device's published rates; `bound` names which. intensity: operations per byte.
    needs: the least that has to be sent. differences: where the program sends a different number of bytes; empty where its
    text can't be read, or where (unknown) what has to be sent can't be worked out. looped: the program has loops, whose bodies
    the compiler counts once: operations are attnops' count, and bytes_moved is 0, unknown.
    """

    name: str
    compiled: bool
    failure: Failure | None
    advice: str | None = None
    held: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    kernels: tuple[AnyKernelUse, ...] | None = ()
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    peak_bytes: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0
    roofline_seconds: float = 0.0
    bound: str = ""
    intensity: float = 0.0
    collectives: tuple[Collective, ...] | None = ()
    needs: tuple[Need, ...] = ()
    differences: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    looped: bool = False
    uncompiled: str = ""

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Why what a compiled pass of several devices sends couldn't be compared with what is needed."""
        if not self.compiled or self.failure is not None:
            return ()
        return (*((_UNREAD,) if self.collectives is None else ()), *self.unknown)


@dataclass(frozen=True)
class TargetReport:
    """A call on one target. `device` is known for TPUs and NVIDIA GPUs, VMEM for TPUs.

    names: of all passes; `passes` has those that are done. lower_only: compiling wasn't asked for.
    """

    target: str
    plan: Plan
    device: DeviceLimits | None
    vmem_default: int
    vmem_most: int
    passes: tuple[PassReport, ...]
    warnings: tuple[str, ...]
    names: tuple[str, ...] = ()
    lower_only: bool = False

    @property
    def outcome(self) -> Outcome:
        """`passed` if an implementation may run it, and every pass was compiled, fits, and is known to send what it has to."""
        return outcome_of(
            failed=self.plan.implementation is None or any(p.failure or p.differences for p in self.passes),
            compiled=len(self.passes) == len(self.names) and all(p.compiled for p in self.passes),
            lower_only=self.lower_only,
            unchecked=self.unchecked,
        )

    @property
    def passed(self) -> bool:
        """Whether everything was checked and is as it should be."""
        return self.outcome is Outcome.PASSED

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Why what compiled passes send couldn't be compared with what is needed."""
        if self.plan.problem.devices == 1:
            return ()
        return tuple(dict.fromkeys(f"{p.name}: what is sent: {why}" for p in self.passes for why in p.unchecked))

    @property
    def pending(self) -> str:
        """The pass that is next; empty after the last."""
        return next(iter(self.names[len(self.passes) :]), "")

    @property
    def progress(self) -> tuple[int, int, str]:
        """(passes done, of how many, the next one's name)."""
        return len(self.passes), len(self.names), self.pending

    def given_up(self, why: str) -> TargetReport:
        """The report if compiling the next pass is given up, and with it those after it."""
        first, *rest = (PassReport(name, False, None, uncompiled=why) for name in self.names[len(self.passes) :])
        others = (replace(one, uncompiled=f"not tried: {first.name} was {why}") for one in rest)
        return replace(self, passes=(*self.passes, first, *others))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "target": self.target,
            "passed": self.passed,
            "outcome": str(self.outcome),
            "unchecked": list(self.unchecked),
            "device": None if self.device is None else self.device._asdict(),
            "vmem_default_bytes": self.vmem_default,
            "vmem_most_bytes": self.vmem_most,
            "warnings": list(self.warnings),
            "passes": [
                vars(p)
                | {
                    "failure": None if p.failure is None else p.failure._asdict(),
                    "kernels": None if p.kernels is None else [k.to_dict() for k in p.kernels],
                    "collectives": None
                    if p.collectives is None
                    else [vars(c) | {"sent_bytes": c.sent_bytes} for c in p.collectives],
                    "needs": [need._asdict() for need in p.needs],
                    "differences": list(p.differences),
                    "unknown": list(p.unknown),
                }
                for p in self.passes
            ],
            "plan": self.plan.to_dict(),
        }


def verify_call(operation: Operation, arguments: Mapping[str, Any], target: str) -> TargetReport:
    """Plan the call, then compile its forward pass and, in mode train, its gradient.

    The operation's mesh is of described devices, of real devices, or abstract; with an abstract mesh the passes are only lowered.
    `arguments` are those of `operation.plan`, with ShapeDtypeStructs for arrays.
    """
    *_, report = call_reports(operation, arguments, target)
    return report


def call_reports(
    operation: Operation, arguments: Mapping[str, Any], target: str, *, lower_only: bool = False
) -> Iterator[TargetReport]:
    """The report of verify_call as it grows: with the plan, and then with one more pass each time. lower_only: as with an
    abstract mesh."""
    plan = operation.plan(**arguments)
    problem = plan.problem
    tpu = problem.platform == "tpu"
    device = device_limits(problem.platform, problem.device_kind, devices_cores(operation.metadata.mesh))
    default, most = vmem_of(problem.device_kind)[:2] if tpu else (0, 0)
    names: tuple[str, ...] = ()
    if plan.implementation is not None:
        names = ("forward", "forward and backward") if problem.mode == "__train__" else ("forward",)
    limit = getattr(plan.config, "vmem_limit_bytes", None) if tpu and names else None
    warnings: tuple[str, ...] = ()
    if device is not None and limit is not None and limit > most:
        warnings = (
            f"vmem_limit_bytes={limit} ({bytes_text(limit)}) is more than {device.kind} has: the compiler takes "
            f"{bytes_text(most)} and doesn't say so",
        )
    report = TargetReport(target, plan, device, default, most, (), warnings, names, lower_only)
    yield report
    for name in names:
        made = _verify_pass(operation, arguments, plan, device, name, most, lower_only)
        passes = (*report.passes, made)
        report = replace(report, passes=passes, warnings=(*warnings, *_passes_warnings(plan, device, passes)))
        yield report


def _passes_warnings(plan: Plan, device: DeviceLimits | None, passes: tuple[PassReport, ...]) -> Iterator[str]:
    problem = plan.problem
    wide = sent_itemsize(problem.runtime_dtype, problem.platform == "cpu")
    if wide > jnp.dtype(problem.runtime_dtype).itemsize and any(p.collectives for p in passes):
        yield f"XLA:CPU sends {problem.runtime_dtype} as float32: other devices send half of these bytes"
    peak = max(p.peak_bytes for p in passes)
    if problem.platform == "tpu" and device is not None and peak > device.hbm_bytes:
        yield f"{bytes_text(peak)} at the peak is more than the device's {bytes_text(device.hbm_bytes)} of HBM"


def _verify_pass(
    operation: Operation,
    arguments: Mapping[str, Any],
    plan: Plan,
    device: DeviceLimits | None,
    name: str,
    vmem_most: int,
    lower_only: bool,
) -> PassReport:
    mesh = operation.metadata.mesh
    start = time.perf_counter()
    problem = plan.problem
    here = compiles_here(mesh, problem.platform) and not lower_only
    try:
        with tracing_on(mesh, problem.platform):
            program, arrays = call_program(operation, arguments, plan, "backward" in name)
            lowered = lowered_for(program.trace(arrays), problem.platform)
        if not here:
            why = "only lowering was asked for" if lower_only else not_compiled(problem.platform)
            return PassReport(name, False, None, seconds=time.perf_counter() - start, uncompiled=why)
        compiled = lowered.compile()
    except AttnOpsError:
        raise
    except Exception as error:
        found = failure(error)
        if found.memory not in ("vmem", "shared"):
            return PassReport(name, here, found, seconds=time.perf_counter() - start)
        better = advice(operation, arguments, plan, found, name, vmem_most)
        return PassReport(name, here, found, better, held(plan, found), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    text = program_text(compiled)
    memory, work = compiled.memory_analysis(), compiled.cost_analysis()
    parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    peak = sum(parts) - memory.alias_size_in_bytes
    looped = work is not None and text is not None and " while(" in text
    if looped:
        flops, moved = attention_flops(plan, "backward" in name), 0.0
    elif work is None:  # a program for GPUs
        flops, moved = attention_flops(plan, "backward" in name), float(sum(parts[:2]))
    else:
        flops, moved = float(work.get("flops", 0.0)), float(work.get("bytes accessed", 0.0))
    arithmetic, traffic = 0.0, 0.0
    if device is not None:
        arithmetic, traffic = device.roofline(flops, moved, problem.runtime_dtype, exact_products(plan))
    sizes = {axis.name: axis.size for axis in problem.mesh}
    sent = None if text is None else collectives(text, sizes)
    least = least_traffic(plan, "backward" in name)
    kernels = None if text is None else kernels_of_program(compiled, text, problem.platform, problem.device_kind)
    return PassReport(
        name,
        True,
        unheld(problem.platform, device, peak),
        None,
        (),
        seconds,
        kernels,
        *parts,
        peak,
        flops,
        moved,
        max(arithmetic, traffic),
        "" if device is None else "arithmetic" if arithmetic >= traffic else "HBM",
        flops / moved if moved else 0.0,
        sent,
        least.needs,
        () if sent is None else differences(least, sent),
        least.unknown,
        looped,
    )
