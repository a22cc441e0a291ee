"""verify_step: compile a planned step over pages for described or real devices; report whether it fits, and its memory.
step_reports: the same, planned first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..devices import vmem_of
from ..errors import AttnOpsError
from ..operators.paged import PagedOperation
from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged_cache.batch import RaggedBatch
from ..operators.paged_cache.state import CacheState, abstract
from ..planning.paged.page_reads import step_flops
from ..planning.paged.paged_plan import PagedPlan
from ..planning.paged.step_operands import token_specs
from ..sharding import axes_at
from ..sharding.mesh import devices_cores
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
from .outcome import Outcome, outcome_of
from .targets import not_compiled

__all__ = ["StepReport", "step_reports", "verify_step"]

_UNREAD = "what is sent: this jaxlib can't read programs of this libtpu"


@dataclass(frozen=True)
class StepReport:
    """A step on one target, per device. Bytes are the compiler's.

    compiled: False where the step was only lowered, or where compiling was given up; `uncompiled` says why. lower_only:
    compiling wasn't asked for. pending: 'step' until it is lowered or compiled. page_bytes: of the pages that the batch has to
    read, and of the step's own keys as written; flops: of the products over visible keys and values. roofline_seconds: the longer
    of the two at the device's published rates; `bound` names which. kernels, collectives: None where the compiled program's
    text can't be read.
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
    lower_only: bool = False
    uncompiled: str = ""
    pending: str = ""

    @property
    def progress(self) -> tuple[int, int, str]:
        """(programs done, of how many, the next one's name)."""
        return (0, 1, self.pending) if self.pending else (1, 1, "")

    def given_up(self, why: str) -> StepReport:
        """The report if compiling is given up."""
        return replace(self, pending="", uncompiled=why)

    @property
    def outcome(self) -> Outcome:
        """`passed` if an implementation may run it, the cache is accepted, it was compiled and fits, and devices are known to
        send nothing except what merges the outputs of devices with pages of the same sequences."""
        refused = self.plan.implementation is None or bool(self.plan.cache.refused)
        return outcome_of(
            failed=refused or self.failure is not None or bool(self.unneeded),
            compiled=self.compiled,
            lower_only=self.lower_only,
            unchecked=self.unchecked,
        )

    @property
    def passed(self) -> bool:
        """Whether everything was checked and is as it should be."""
        return self.outcome is Outcome.PASSED

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What couldn't be checked of the compiled step."""
        unread = self.compiled and self.failure is None and self.collectives is None
        return (_UNREAD,) if unread and self.plan.problem.mesh else ()

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
        left_out = ("plan", "device", "failure", "pending", "lower_only")
        whole = {name: value for name, value in vars(self).items() if name not in left_out}
        return whole | {
            "passed": self.passed,
            "outcome": str(self.outcome),
            "unchecked": list(self.unchecked),
            "peak_bytes": self.peak_bytes,
            "device": None if self.device is None else self.device._asdict(),
            "failure": None if self.failure is None else self.failure._asdict(),
            "kernels": None if self.kernels is None else [kernel.to_dict() for kernel in self.kernels],
            "unneeded_collectives": [vars(sent) for sent in self.unneeded],
            "collectives": None if self.collectives is None else [vars(sent) for sent in self.collectives],
            "plan": self.plan.to_dict(),
        }


def verify_step(operation: PagedOperation, step: DeclaredStep, target: str) -> StepReport:
    """Plan the step, then compile it with its pages donated. The mesh is of described devices, of real devices, or abstract;
    with an abstract mesh the step is only lowered."""
    *_, report = step_reports(operation, step, target)
    return report


def step_reports(
    operation: PagedOperation, step: DeclaredStep, target: str, *, lower_only: bool = False
) -> Iterator[StepReport]:
    """The report of verify_step as it grows: planned, then compiled. lower_only: as with an abstract mesh."""
    report = _planned(operation, step, target, lower_only)
    yield report
    if report.pending:
        yield _compiled(operation, step, report)


def _compiled(operation: PagedOperation, step: DeclaredStep, report: StepReport) -> StepReport:
    """The report of a planned step, with what the compiler says."""
    lower_only = report.lower_only
    report = replace(report, pending="")
    plan, device, mesh = report.plan, report.device, operation.metadata.mesh
    problem = plan.problem
    here = compiles_here(mesh, problem.platform) and not lower_only
    start = time.perf_counter()
    try:
        with tracing_on(mesh, problem.platform):
            lowered = _lowered(operation, step, plan, mesh)
        compiled = lowered.compile() if here else None
    except AttnOpsError:
        raise
    except Exception as error:  # the compiler's error, of whatever class
        seconds = time.perf_counter() - start
        return replace(report, compiled=here, failure=failure(error), seconds=seconds)
    seconds = time.perf_counter() - start
    if compiled is None:
        why = "only lowering was asked for" if lower_only else not_compiled(problem.platform)
        return replace(report, seconds=seconds, uncompiled=why)
    text, memory = program_text(compiled), compiled.memory_analysis()
    parts = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    moved = 0 if plan.reads is None else plan.reads.device_bytes
    flops = step_flops(problem, step.batch)
    peak = sum(parts) - memory.alias_size_in_bytes
    arithmetic, traffic = (0.0, 0.0) if device is None else device.roofline(flops, moved, problem.runtime_dtype, False)
    return replace(
        report,
        compiled=True,
        failure=unheld(problem.platform, device, peak),
        seconds=seconds,
        kernels=None if text is None else kernels_of_program(compiled, text, problem.platform, problem.device_kind),
        collectives=None if text is None else collectives(text, {axis.name: axis.size for axis in problem.mesh}),
        argument_bytes=parts[0],
        output_bytes=parts[1],
        temp_bytes=parts[2],
        alias_bytes=memory.alias_size_in_bytes,
        page_bytes=moved,
        flops=flops,
        roofline_seconds=max(arithmetic, traffic),
        bound="" if device is None else "arithmetic" if arithmetic >= traffic else "HBM",
    )


def _planned(operation: PagedOperation, step: DeclaredStep, target: str, lower_only: bool) -> StepReport:
    """The report of a step that is planned, and neither lowered nor compiled yet."""
    options = step.options | {"softmax_aux": step.sinks}
    plan = operation.plan(
        step.query, step.key, step.value, cache=step.cache, layer=step.layer, batch=step.batch, **options
    )
    problem = plan.problem
    limits = vmem_of(problem.device_kind)[:2] if problem.platform == "tpu" else (0, 0)
    device = device_limits(problem.platform, problem.device_kind, devices_cores(operation.metadata.mesh))
    pending = "" if plan.implementation is None or plan.cache.refused else "step"
    return StepReport(target, plan, device, *limits, False, None, lower_only=lower_only, pending=pending)


def _lowered(operation: PagedOperation, step: DeclaredStep, plan: PagedPlan, mesh: Any) -> Any:
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
