"""verify_call: compile a planned call for described devices or for those of this machine; report whether it fits, its memory and
its traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from ..errors import AttnOpsError
from ..operators import Operation
from ..operators.kernels.splash.vmem import vmem_of
from ..planning import Plan
from ..planning.placed_tensors import sent_itemsize
from ..planning.text import bytes_text
from ..planning.traffic import Need, least_traffic
from .advice import advice, held
from .call_program import call_program
from .collectives import Collective, collectives
from .compiled import Failure, failure, program_text
from .devices import AnyKernelUse, DeviceLimits, device_limits, kernels_of_program, lowered_for, tracing_on, unheld
from .differences import differences
from .work import attention_flops, exact_products

__all__ = ["PassReport", "TargetReport", "verify_call"]


@dataclass(frozen=True)
class PassReport:
    """One pass, per device. `compiled` is False where the pass was only lowered. Bytes and operations are the compiler's counts.
    For GPUs the compiler counts neither: operations are attnops' count, and bytes are those of arguments and outputs, each once.

    failure: why it didn't compile, or doesn't fit though it compiled. held: what the failed kernel holds in VMEM, as (what,
    bytes), largest first, by attnops' count, which leaves out what the compiler spills. kernels, collectives: None where the
    compiled program's text can't be read. roofline_seconds: the longer of arithmetic and HBM traffic at the device's published
    rates; `bound` names which. intensity: operations per byte. needs: the least that has to be sent. differences: where the
    program sends a different number of bytes; empty where its text can't be read, or where (unknown) what has to be sent can't
    be worked out. looped: the program has loops, whose bodies the compiler counts once: operations are attnops' count, and
    bytes_moved is 0, unknown.
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


@dataclass(frozen=True)
class TargetReport:
    """A call on one target. `device` is known for TPUs and NVIDIA GPUs, VMEM for TPUs."""

    target: str
    plan: Plan
    device: DeviceLimits | None
    vmem_default: int
    vmem_most: int
    passes: tuple[PassReport, ...]
    warnings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether an implementation may run it, and every pass compiled (or, without its compiler, was lowered), fits, and sends
        what it has to."""
        fine = all(p.failure is None and not p.differences for p in self.passes)
        return self.plan.implementation is not None and fine

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "target": self.target,
            "passed": self.passed,
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


def verify_call(
    operation: Operation, arguments: Mapping[str, Any], target: str, told: Callable[[int, int, str], None] | None = None
) -> TargetReport:
    """Plan the call, then compile its forward pass and, in mode train, its gradient.

    The operation's mesh is of described devices, of real devices, or abstract; with an abstract mesh the passes are only lowered.
    `arguments` are those of `operation.plan`, with ShapeDtypeStructs for arrays. `told` is called with (done, of, name) for each
    pass.
    """
    plan = operation.plan(**arguments)
    tpu = plan.problem.platform == "tpu"
    device = device_limits(plan.problem.platform, plan.problem.device_kind)
    default, most = vmem_of(plan.problem.device_kind)[:2] if tpu else (0, 0)
    passes: list[PassReport] = []
    warnings: list[str] = []
    if plan.implementation is not None:
        limit = getattr(plan.config, "vmem_limit_bytes", None)
        if device is not None and limit is not None and limit > most:
            warnings.append(
                f"vmem_limit_bytes={limit} ({bytes_text(limit)}) is more than {device.kind} has: the compiler takes "
                f"{bytes_text(most)} and doesn't say so"
            )
        backward = plan.problem.mode == "__train__"
        names = ("forward", "forward and backward") if backward else ("forward",)
        for done, name in enumerate(names):
            if told is not None:
                told(done, len(names), name)
            passes.append(_verify_pass(operation, arguments, plan, device, name, most))
        wide = sent_itemsize(plan.problem.runtime_dtype, plan.problem.platform == "cpu")
        if wide > jnp.dtype(plan.problem.runtime_dtype).itemsize and any(p.collectives for p in passes):
            warnings.append(
                f"XLA:CPU sends {plan.problem.runtime_dtype} as float32: other devices send half of these bytes"
            )
        peak = max(p.peak_bytes for p in passes)
        if tpu and device is not None and peak > device.hbm_bytes:
            warnings.append(
                f"{bytes_text(peak)} at the peak is more than the device's {bytes_text(device.hbm_bytes)} of HBM"
            )
    return TargetReport(target, plan, device, default, most, tuple(passes), tuple(warnings))


def _verify_pass(
    operation: Operation,
    arguments: Mapping[str, Any],
    plan: Plan,
    device: DeviceLimits | None,
    name: str,
    vmem_most: int,
) -> PassReport:
    mesh = operation.metadata.mesh
    start = time.perf_counter()
    here = isinstance(mesh, Mesh)
    problem = plan.problem
    try:
        with tracing_on(mesh, problem.platform):
            program, arrays = call_program(operation, arguments, plan, "backward" in name)
            lowered = lowered_for(program.trace(arrays), problem.platform)
        if not here:
            return PassReport(name, False, None, seconds=time.perf_counter() - start)
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
