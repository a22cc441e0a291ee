"""verify_call: compile a planned call for a described TPU, and say whether it fits and what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..errors import AttnOpsError
from ..operators import Operation
from ..operators.kernels.splash.vmem import vmem_of
from ..registry import Plan
from ..registry.explain import bytes_text
from .collectives import Collective, collectives
from .compiled import Failure, KernelUse, failure, kernels, program_text
from .generations import Device, device_of
from .program import outputs, outputs_and_gradients

__all__ = ["PassReport", "TargetReport", "verify_call"]


@dataclass(frozen=True)
class PassReport:
    """One pass, per device. `compiled` is False where it was only lowered. Bytes and operations are the compiler's counts.

    held: what the kernel that failed holds in VMEM, (what, bytes), the largest first, as attnops counts it: without what
    the compiler spills. kernels, collectives: None where the compiled program's text can't be read. roofline_seconds: the
    longer of arithmetic and HBM traffic at the device's published rates, which `bound` names; intensity: operations a byte.
    """

    name: str
    compiled: bool
    failure: Failure | None
    advice: str | None = None
    held: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    kernels: tuple[KernelUse, ...] | None = ()
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


@dataclass(frozen=True)
class TargetReport:
    """A call on one target."""

    target: str
    plan: Plan
    device: Device
    vmem_default: int
    vmem_most: int
    passes: tuple[PassReport, ...]
    warnings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether something may run it and every pass compiled (or, without libtpu, was lowered)."""
        return self.plan.implementation is not None and all(p.failure is None for p in self.passes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "target": self.target,
            "passed": self.passed,
            "device": self.device._asdict(),
            "vmem_default_bytes": self.vmem_default,
            "vmem_most_bytes": self.vmem_most,
            "warnings": list(self.warnings),
            "passes": [
                vars(p)
                | {
                    "failure": None if p.failure is None else p.failure._asdict(),
                    "kernels": None if p.kernels is None else [k._asdict() for k in p.kernels],
                    "collectives": None
                    if p.collectives is None
                    else [vars(c) | {"sent_bytes": c.sent_bytes} for c in p.collectives],
                }
                for p in self.passes
            ],
            "plan": self.plan.to_dict(),
        }


def verify_call(operation: Operation, arguments: Mapping[str, Any], target: str) -> TargetReport:
    """Plan the call, then compile its forward pass, and in mode train its gradient.

    The operation's mesh is of described devices, or abstract: then the passes are only lowered. `arguments` are those of
    `operation.plan`, with ShapeDtypeStructs for arrays.
    """
    plan = operation.plan(**arguments)
    device = device_of(plan.problem.device_kind)
    vmem = vmem_of(plan.problem.device_kind)
    passes: list[PassReport] = []
    warnings: list[str] = []
    if plan.implementation is not None:
        limit = getattr(plan.config, "vmem_limit_bytes", None)
        if limit is not None and limit > vmem.most:
            warnings.append(
                f"vmem_limit_bytes={limit} ({bytes_text(limit)}) is more than {device.kind} has: the compiler takes "
                f"{bytes_text(vmem.most)} without a word"
            )
        backward = plan.problem.mode == "__train__"
        for name in ("forward", "forward and backward") if backward else ("forward",):
            passes.append(_verify_pass(operation, arguments, plan, device, name, vmem.most))
        peak = max(p.peak_bytes for p in passes)
        if peak > device.hbm_bytes:
            warnings.append(
                f"{bytes_text(peak)} at the peak is more than the device's {bytes_text(device.hbm_bytes)} of HBM"
            )
    return TargetReport(target, plan, device, vmem.default, vmem.most, tuple(passes), tuple(warnings))


def _verify_pass(
    operation: Operation, arguments: Mapping[str, Any], plan: Plan, device: Device, name: str, vmem_most: int
) -> PassReport:
    mesh = operation.metadata.mesh
    function, arrays = _program(operation, arguments, plan, "backward" in name)
    start = time.perf_counter()
    here = isinstance(mesh, Mesh)
    try:
        traced = jax.jit(function).trace(arrays)
        if not here:
            traced.lower(lowering_platforms=("tpu",))
            return PassReport(name, False, None, seconds=time.perf_counter() - start)
        compiled = traced.lower().compile()
    except AttnOpsError:
        raise
    except Exception as error:
        found = failure(error)
        advice = _advice(operation, arguments, plan, found, name, vmem_most) if found.memory == "vmem" else None
        held = _held(plan, found) if found.memory == "vmem" else ()
        return PassReport(name, here, found, advice, held, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    text = program_text(compiled)
    memory, work = compiled.memory_analysis(), compiled.cost_analysis() or {}
    flops, moved = float(work.get("flops", 0.0)), float(work.get("bytes accessed", 0.0))
    # attnops' kernels ask for exact float32 products; elsewhere one bfloat16 pass is JAX's default.
    exact = plan.problem.runtime_dtype == "float32" and getattr(plan.config, "kernel", None) == "attnops"
    arithmetic, traffic = device.roofline(flops, moved, exact and plan.method == "forward_tpu")
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return PassReport(
        name,
        True,
        None,
        None,
        (),
        seconds,
        None if text is None else kernels(text),
        *sizes,
        sum(sizes) - memory.alias_size_in_bytes,
        flops,
        moved,
        max(arithmetic, traffic),
        "arithmetic" if arithmetic >= traffic else "HBM",
        flops / moved if moved else 0.0,
        None if text is None else collectives(text),
    )


def _held(plan: Plan, found: Failure) -> tuple[tuple[str, int], ...]:
    """What the kernel that failed holds, the largest first."""
    problem = plan.problem
    counted = problem.operation.memory(plan.method or "", problem, plan.placement, plan.config)
    parts = counted.get(found.kernel or "", {})
    return tuple(sorted(((what, size) for what, size in parts.items() if size), key=lambda part: -part[1]))


def _program(
    operation: Operation, arguments: Mapping[str, Any], plan: Plan, backward: bool
) -> tuple[Callable[[dict[str, Any]], Any], dict[str, jax.ShapeDtypeStruct]]:
    """(the call, or it with its gradient, as a function of its arrays; the arrays, laid out as planned)."""
    mesh = operation.metadata.mesh

    def laid_out(name: str, x: Any) -> jax.ShapeDtypeStruct:
        if mesh is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        spec = plan.placement.given(name, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def holds_arrays(x: Any) -> bool:
        leaves = jax.tree.leaves(x)  # a mask may hold arrays; a static one has no leaves
        return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)

    arrays = {
        name: jax.tree.map(lambda leaf, name=name: laid_out(name, leaf), x)
        for name, x in arguments.items()
        if holds_arrays(x)
    }
    static = {name: x for name, x in arguments.items() if name not in arrays}

    def program(given: dict[str, Any]) -> Any:
        return (outputs_and_gradients if backward else outputs)(operation, given | static)

    return program, arrays


def _advice(
    operation: Operation, arguments: Mapping[str, Any], plan: Plan, found: Failure, name: str, vmem_most: int
) -> str:
    """The largest choice that compiles: more VMEM if there is more, else smaller blocks. Each is tried, none is guessed."""
    config, tag = plan.config, plan.problem.operation.name
    blocks = {n: v for n, v in config.model_dump().items() if n.startswith("block_") and isinstance(v, int)}
    tries: list[dict[str, int]] = []
    if "vmem_limit_bytes" in type(config).model_fields:
        enough = -(-int((found.needed or 0) * 1.25) >> 20) << 20
        tries += [{"vmem_limit_bytes": n} for n in (enough, vmem_most) if (found.available or 0) < n <= vmem_most]
    for shrink in (2, 4, 8, 16):
        tries.append({n: min(v, max(128, v // shrink // 128 * 128)) for n, v in blocks.items()})
    for changes in tries:
        if all(getattr(config, n) == v for n, v in changes.items()):
            continue
        try:
            changed = plan.problem.config.with_fields(changes)
            again = type(operation)(operation.metadata.replace(operation_configs={tag: changed}))
            decided = again.plan(**arguments)
            function, arrays = _program(again, arguments, decided, "backward" in name)
            jax.jit(function).lower(arrays).compile()
        except Exception:
            continue
        return "compiles with " + ", ".join(f"{n}={v}" for n, v in changes.items())
    return "neither more VMEM nor smaller blocks make it compile"
