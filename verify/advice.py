"""What to say to a kernel that takes too much VMEM: what it holds, and which sizes compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..operators import Operation
from ..planning import Plan
from .call_program import call_program
from .compiled import Failure

__all__ = ["advice", "held"]


def held(plan: Plan, found: Failure) -> tuple[tuple[str, int], ...]:
    """What the kernel that failed holds, the largest first."""
    problem = plan.problem
    counted = plan.operation.memory(plan.method or "", problem, plan.placement, plan.config)
    parts = counted.get(found.kernel or "", {})
    return tuple(sorted(((what, size) for what, size in parts.items() if size), key=lambda part: -part[1]))


def advice(
    operation: Operation, arguments: Mapping[str, Any], plan: Plan, found: Failure, name: str, vmem_most: int
) -> str:
    """The largest choice that compiles: more VMEM if there is more, else smaller blocks. Each is tried, none is guessed."""
    config, tag = plan.config, plan.operation.name
    blocks = {n: v for n, v in config.every_field().items() if n.startswith("block_") and isinstance(v, int)}
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
            program, arrays = call_program(again, arguments, decided, "backward" in name)
            program.lower(arrays).compile()
        except Exception:
            continue
        return "compiles with " + ", ".join(f"{n}={v}" for n, v in changes.items())
    return "neither more VMEM nor smaller blocks make it compile"
