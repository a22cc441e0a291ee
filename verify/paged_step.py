"""verify_step: compile a planned step over pages for described or real devices; report whether it fits, and its memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import AttnOpsError
from ..operators.kernels.splash.vmem import vmem_of
from ..operators.paged import Paged
from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged_cache.batch import RaggedBatch
from ..operators.paged_cache.state import CacheState, abstract
from ..planning.paged.decide_paged import token_specs
from ..planning.paged.page_reads import step_flops
from ..planning.paged.paged_plan import PagedPlan
from ..sharding import axes_at
from .collectives import Collective, collectives
from .compiled import Failure, failure, program_text
from .devices import AnyKernelUse, DeviceLimits, device_limits, kernels_of_program, lowered_for, tracing_on, unheld

__all__ = ["StepReport", "verify_step"]


@dataclass(frozen=True)
class StepReport:
    """A step on one target, per device. `compiled` is False where the step was only lowered. Bytes are the compiler's.

    page_bytes: of the pages that the batch has to read, and of the step's own keys as written; flops: of the products over
    visible keys and values. roofline_seconds: the longer of the two at the device's published rates; `bound` names which.
    kernels, collectives: None where the compiled program's text can't be read.
    """

    target: str
    plan: PagedPlan
    device: DeviceLimits | None
    vmem_default: int
    vmem_most: int
    compiled: bool
    failure: Failure | None
    seconds: float = 0.0
    kernels: tuple[AnyKernelUse, ...] | None = ()
    collectives: tuple[Collective, ...] | None = ()
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    page_bytes: int = 0
    flops: float = 0.0
    roofline_seconds: float = 0.0
    bound: str = ""

    @property
    def passed(self) -> bool:
        """Whether an implementation may run it, it compiled (or, without its compiler, was lowered) and fits, and devices send
        nothing except what merges the outputs of devices with pages of the same sequences."""
        return self.plan.implementation is not None and self.failure is None and not self.unneeded

    @property
    def unneeded(self) -> tuple[Collective, ...]:
        """Collectives that aren't needed."""
        problem = self.plan.problem
        left, found = problem.joined_bytes, []
        for sent in self.collectives or ():
            size = sent.count * sent.result_bytes
            if sent.kind == "all-reduce" and set(sent.axes) == set(problem.sequence_axes) and size <= left:
                left -= size
            else:
                found.append(sent)
        return tuple(found)

    @property
    def peak_bytes(self) -> int:
        """Bytes of arguments, outputs and temporary memory; donated pages count once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        whole = {name: value for name, value in vars(self).items() if name not in ("plan", "device", "failure")}
        return whole | {
            "passed": self.passed,
            "peak_bytes": self.peak_bytes,
            "device": None if self.device is None else self.device._asdict(),
            "failure": None if self.failure is None else self.failure._asdict(),
            "kernels": None if self.kernels is None else [kernel.to_dict() for kernel in self.kernels],
            "unneeded_collectives": [vars(sent) for sent in self.unneeded],
            "collectives": None if self.collectives is None else [vars(sent) for sent in self.collectives],
            "plan": self.plan.to_dict(),
        }


def verify_step(operation: Paged, step: DeclaredStep, target: str) -> StepReport:
    """Plan the step, then compile it with its pages donated. The mesh is of described devices, of real devices, or abstract;
    with an abstract mesh the step is only lowered."""
    options = step.options | {"softmax_aux": step.sinks}
    plan = operation.plan(
        step.query, step.key, step.value, cache=step.cache, layer=step.layer, batch=step.batch, **options
    )
    problem, mesh = plan.problem, operation.metadata.mesh
    tpu = problem.platform == "tpu"
    device = device_limits(problem.platform, problem.device_kind)
    limits = vmem_of(problem.device_kind)[:2] if tpu else (0, 0)
    here = mesh is None or isinstance(mesh, Mesh)
    if plan.implementation is None or plan.cache.refused:
        return StepReport(target, plan, device, *limits, False, None)
    start = time.perf_counter()
    try:
        with tracing_on(mesh, problem.platform):
            lowered = _lowered(operation, step, plan, mesh)
        compiled = lowered.compile() if here else None
    except AttnOpsError:
        raise
    except Exception as error:  # the compiler's error, of whatever class
        return StepReport(target, plan, device, *limits, here, failure(error), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if compiled is None:
        return StepReport(target, plan, device, *limits, False, None, seconds)
    text, memory = program_text(compiled), compiled.memory_analysis()
    parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    moved = 0 if plan.reads is None else plan.reads.device_bytes
    flops = step_flops(problem, step.batch)
    peak = sum(parts) - memory.alias_size_in_bytes
    arithmetic, traffic = (0.0, 0.0) if device is None else device.roofline(flops, moved, problem.runtime_dtype, False)
    return StepReport(
        target,
        plan,
        device,
        *limits,
        True,
        unheld(problem.platform, device, peak),
        seconds,
        None if text is None else kernels_of_program(compiled, text, problem.platform, problem.device_kind),
        None if text is None else collectives(text, {axis.name: axis.size for axis in problem.mesh}),
        *parts,
        memory.alias_size_in_bytes,
        moved,
        flops,
        max(arithmetic, traffic),
        "" if device is None else "arithmetic" if arithmetic >= traffic else "HBM",
    )


def _lowered(operation: Paged, step: DeclaredStep, plan: PagedPlan, mesh: Any) -> Any:
    """The step lowered with every array placed as planned; one layer of the cache, donated."""
    state = abstract(plan.cache, mesh, layers=1)
    query, key = token_specs(plan.cache)

    def on(x: Any, spec: PartitionSpec) -> Any:
        return (
            None
            if x is None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if mesh is None else NamedSharding(mesh, spec))
        )

    batch = RaggedBatch(
        *(
            on(getattr(step.batch, name), plan.cache[name].fitted.spec)
            for name in ("cu_q_lens", "kv_lens", "page_table", "num_seqs")
        )
    )
    heads = axes_at(query, 1) or None
    arrays = on(step.query, query), on(step.key, key), on(step.value, key), on(step.sinks, PartitionSpec(heads))

    def run(state: CacheState, batch: RaggedBatch, query: Any, key: Any, value: Any, sinks: Any) -> Any:
        call = step.options | {"softmax_aux": sinks}
        out = operation(query, key, value, state=state, layer=0, batch=batch, **call)
        return out.attention_outputs, out.lse, out.state

    traced = jax.jit(run, donate_argnums=0).trace(state, batch, *arrays)
    return lowered_for(traced, plan.problem.platform)
