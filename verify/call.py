"""verify_call: compile a planned call for described devices or for those of this machine; report whether it fits, its memory and
its traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ..operators import Operation
from ..planning import OperationConfig
from ..planning.placed_tensors import sent_itemsize
from ..planning.traffic import Traffic, min_traffic
from .advice import advice, vmem_breakdown
from .call_program import call_program
from .compiled import Failure
from .passes import Planned, names_of_passes, target_reports
from .report import PassReport, TargetReport
from .search import Scheduled
from .tune import scheduled_call
from .work import attention_flops, exact_products

__all__ = ["PlannedCall", "verify_call"]


class PlannedCall(Planned):
    """A planned call: its forward pass and, in mode train, that with its gradient."""

    def __init__(self, operation: Operation, arguments: Mapping[str, Any]) -> None:
        self.operation, self.arguments = operation, arguments
        self.call = self.plan = operation.plan(**arguments)
        self.mesh = operation.metadata.mesh
        self.names = names_of_passes(self.call.problem.mode)
        self.exact = exact_products(self.call)

    def traced(self, name: str) -> Any:
        program, arrays = call_program(self.operation, self.arguments, self.call, "backward" in name)
        return program.trace(arrays)

    def flops(self, name: str) -> float:
        return attention_flops(self.call, "backward" in name)

    def traffic(self, name: str) -> Traffic:
        return min_traffic(self.call, "backward" in name)

    def advice(self, name: str, failure: Failure, max_vmem: int) -> tuple[str | None, tuple[tuple[str, int], ...]]:
        if failure.memory not in ("vmem", "shared"):
            return None, ()

        def lowered(config: OperationConfig) -> Any:
            changed = self.operation.metadata.replace(operation_configs={config.operation: config})
            return PlannedCall(type(self.operation)(changed), self.arguments).lowered(name)

        return advice(lowered, self.call, failure, max_vmem), vmem_breakdown(self.call, failure)

    def scheduled(self, name: str) -> Scheduled:
        return scheduled_call(self.call, "backward" if "backward" in name else "forward")

    def warnings(self, passes: tuple[PassReport, ...]) -> Iterator[str]:
        problem = self.call.problem
        wide = sent_itemsize(problem.runtime_dtype, problem.platform == "cpu")
        if wide > jnp.dtype(problem.runtime_dtype).itemsize and any(p.collectives for p in passes):
            yield f"XLA:CPU sends {problem.runtime_dtype} as float32: other devices send half of these bytes"


def verify_call(operation: Operation, arguments: Mapping[str, Any], target: str) -> TargetReport:
    """Plan the call, then compile its forward pass and, in mode train, its gradient.

    The operation's mesh is of described devices, of real devices, or abstract; with an abstract mesh the passes are only lowered.
    `arguments` are those of `operation.plan`, with ShapeDtypeStructs for arrays.
    """
    *_, report = target_reports(PlannedCall(operation, arguments), target)
    return report
