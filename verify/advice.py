"""Advice for a kernel that takes too much of a core's memory: what it holds, and which sizes compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..operators import Operation
from ..planning import OperationConfig, Plan
from .call_program import call_program
from .compiled import Failure
from .devices import lowered_for, tracing_on

__all__ = ["advice", "held"]

_OF_TPU, _OF_GPU = 128, 16  # the smallest block size tried


def held(plan: Plan, found: Failure) -> tuple[tuple[str, int], ...]:
    """What the failed kernel holds in VMEM, largest first; empty if the failure isn't about VMEM."""
    if found.memory != "vmem":
        return ()
    problem = plan.problem
    counted = plan.operation.memory(plan.method or "", problem, plan.placement, plan.config)
    parts = counted.get(found.kernel or "", {})
    return tuple(sorted(((what, size) for what, size in parts.items() if size), key=lambda part: -part[1]))


def advice(
    operation: Operation, arguments: Mapping[str, Any], plan: Plan, found: Failure, name: str, vmem_most: int
) -> str:
    """The largest choice that compiles: on a TPU more VMEM if there is more, on a GPU fewer stages, else smaller blocks. Each
    choice is compiled, none is guessed."""
    config, tag = plan.config, plan.problem.config.operation
    for changes in _stages(config) if found.memory == "shared" else _vmem(config, found, vmem_most):
        if all(getattr(config, n) == v for n, v in changes.items()):
            continue
        try:
            changed = plan.problem.config.with_fields(changes)
            again = type(operation)(operation.metadata.replace(operation_configs={tag: changed}))
            decided = again.plan(**arguments)
            with tracing_on(again.metadata.mesh, plan.problem.platform):
                program, arrays = call_program(again, arguments, decided, "backward" in name)
                lowered_for(program.trace(arrays), plan.problem.platform).compile()
        except Exception:
            continue
        return "compiles with " + ", ".join(f"{n}={v}" for n, v in changes.items())
    what = "fewer stages" if found.memory == "shared" else "more VMEM"
    return f"neither {what} nor smaller blocks make it compile"


def _vmem(config: OperationConfig, found: Failure, most: int) -> Iterator[dict[str, int]]:
    if "vmem_limit_bytes" in type(config).model_fields:
        enough = -(-int((found.needed or 0) * 1.25) >> 20) << 20
        yield from ({"vmem_limit_bytes": n} for n in (enough, most) if (found.available or 0) < n <= most)
    yield from _smaller(config, _OF_TPU)


def _stages(config: OperationConfig) -> Iterator[dict[str, int]]:
    stages = _sizes(config, "num_stages")
    for most in range(max(stages.values(), default=1) - 1, 0, -1):
        yield {n: min(v, most) for n, v in stages.items()}
    for changes in _smaller(config, _OF_GPU):
        yield changes | dict.fromkeys(stages, 1)


def _smaller(config: OperationConfig, least: int) -> Iterator[dict[str, int]]:
    blocks = _sizes(config, "block_")
    for shrink in (2, 4, 8, 16):
        yield {n: min(v, max(least, v // shrink // least * least)) for n, v in blocks.items()}


def _sizes(config: OperationConfig, prefix: str) -> dict[str, int]:
    return {n: v for n, v in config.every_field().items() if n.startswith(prefix) and isinstance(v, int)}
