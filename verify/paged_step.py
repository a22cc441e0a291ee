"""PlannedStep: a step over pages as a program to compile, and all that it has to send."""

from __future__ import annotations

from typing import Any

import jax

from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged.step_operation import StepOperation
from ..operators.paged_cache.batch import RaggedBatch
from ..operators.paged_cache.state import abstract
from ..planning.paged.page_reads import selected_bytes, step_flops
from ..planning.paged.paged_problem import PagedProblem
from ..planning.traffic import Need, Traffic
from .collectives import Collective
from .drawn_step import array_specs, plan_declared, step_program
from .passes import Planned, Work

__all__ = ["PlannedStep", "step_traffic", "unneeded"]


class PlannedStep(Planned):
    """A planned step: one pass, with its pages donated."""

    names = ("step",)

    def __init__(self, operation: StepOperation, step: DeclaredStep) -> None:
        self.operation, self.step = operation, step
        self.paged = self.plan = plan_declared(operation, step)
        self.mesh = operation.metadata.mesh

    def traced(self, name: str) -> Any:
        """One layer of the cache, donated."""
        step, cache = self.step, self.paged.cache
        names = ("cu_q_lens", "kv_lens", "page_table", "num_seqs")
        batch = RaggedBatch(*(self.laid_out(getattr(step.batch, n), cache[n].fitted.spec) for n in names))
        specs = array_specs(self.operation, cache)
        arrays = {name: None if x is None else self.laid_out(x, specs[name]) for name, x in step.arrays.items()}
        run = jax.jit(step_program(self.operation, step, 0), donate_argnums=0)
        return run.trace(abstract(cache, self.mesh, layers=1), batch, arrays)

    def flops(self, name: str) -> float:
        return step_flops(self.paged.problem, self.step.batch)

    def work(self, name: str, counted: Any, ends: int, loops: bool) -> Work:
        """By attnops' count, whatever the compiler's is."""
        reads = self.paged.reads
        return Work(self.flops(name), selected_bytes(self.paged.problem) if reads is None else reads.device_bytes)

    def traffic(self, name: str) -> Traffic:
        return step_traffic(self.paged.problem)

    def differences(self, required: Traffic, sent: tuple[Collective, ...]) -> tuple[str, ...]:
        extra = unneeded(required, sent)
        return tuple(
            f"{collective.kind}: {collective.count} over {'+'.join(collective.axes)} that nothing needs"
            for collective in extra
        )


def step_traffic(problem: PagedProblem) -> Traffic:
    """All that a step has to send: what merges the results of devices with pages of the same sequences."""
    what = "merging outputs by lse" if problem.top_k is None else "merging selections"
    return Traffic(tuple(Need(merge.kind, merge.sent, what, axes=problem.sequence_axes) for merge in problem.merges))


def unneeded(required: Traffic, sent: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """The collectives beyond the needs, by kind and mesh axes; not a byte is ignored."""
    left = {(need.kind, frozenset(need.axes)): need.sent_bytes for need in required.needs}
    extra = []
    for collective in sent:
        of = collective.kind, frozenset(collective.axes)
        if collective.sent_bytes <= left.get(of, 0.0) + 0.5:  # the rest of rounded shares
            left[of] = left.get(of, 0.0) - collective.sent_bytes
        else:
            extra.append(collective)
    return tuple(extra)
