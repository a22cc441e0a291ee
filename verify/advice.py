"""Advice for a kernel that takes too much of a core's memory: what it holds, and which sizes compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..planning import OperationConfig, Plan
from ..planning.text import bytes_text
from .compiled import Failure, failure, kernels, program_text

__all__ = ["advice", "min_limit", "vmem_breakdown"]

_MIB = 1 << 20
_TRIES = 3  # limits by what the compiler tells, before the most that there is
_OF_TPU, _OF_GPU = 128, 16  # the smallest block size tried


def vmem_breakdown(plan: Plan, failure: Failure) -> tuple[tuple[str, int], ...]:
    """What the failed kernel holds in VMEM, largest first; empty if the failure isn't about VMEM."""
    if failure.memory != "vmem":
        return ()
    problem = plan.problem
    counted = {} if plan.runs is None else plan.runs.memory(problem, plan.placement, plan.config)
    parts = counted.get(failure.kernel or "", {})
    return tuple(sorted(((what, size) for what, size in parts.items() if size), key=lambda part: -part[1]))


def advice(lowered: Callable[[OperationConfig], Any], plan: Plan, out_of_memory: Failure, max_vmem: int) -> str:
    """The largest choice that compiles: on a TPU the least VMEM that is enough if there is more, on a GPU fewer stages, else
    smaller blocks. Each choice is compiled, none is guessed. lowered: the failed pass with another config."""

    def compiled(changes: dict[str, int]) -> int | Failure:
        """The VMEM that the largest kernel takes with these changes, 0 if it can't be read; or why they don't compile."""
        try:
            program = lowered(plan.problem.config.with_fields(changes)).compile()
        except Exception as error:  # the compiler's, or a size that the config refuses
            return failure(error)
        text = program_text(program)
        return max((kernel.vmem_used or 0 for kernel in kernels(text or "")), default=0)

    field = None if plan.runs is None else plan.runs.memory_field
    if out_of_memory.memory == "vmem" and field is not None:
        limit = min_limit(lambda limit: compiled({field: limit}), out_of_memory, max_vmem)
        if limit is not None:
            return f"compiles with {field}={limit} ({bytes_text(limit)})"
    for changes in _stages(plan.config) if out_of_memory.memory == "shared" else _smaller(plan.config, _OF_TPU):
        if any(getattr(plan.config, n) != v for n, v in changes.items()) and not isinstance(compiled(changes), Failure):
            return "compiles with " + ", ".join(f"{n}={v}" for n, v in changes.items())
    change = "fewer stages" if out_of_memory.memory == "shared" else "more VMEM"
    return f"neither {change} nor smaller blocks make it compile"


def min_limit(compiled: Callable[[int], int | Failure], failure: Failure, max_limit: int) -> int | None:
    """The least vmem_limit_bytes, in whole MiB up to `max_limit`, with which a program compiles that failed for lack of VMEM
    (`failure`); None if there is none.

    compiled: the bytes that the program takes with a limit, or its failure. The need that the compiler tells with a failure may
    be too low (libtpu 0.0.51: 10 MiB with a limit of 8, of a kernel that takes 18), the one after compiling isn't.
    """
    failed, limit = failure.available or 0, _mib(failure.needed or 0)
    for _ in range(_TRIES):
        limit = max(limit, _mib(failed + 1))
        if limit > max_limit:
            break
        outcome = compiled(limit)
        if not isinstance(outcome, Failure):
            return _lowered(compiled, outcome, limit, failed)
        if outcome.memory != "vmem":
            return None
        failed, limit = limit, _mib(outcome.needed or 0)
    if failed >= max_limit:
        return None
    outcome = compiled(max_limit)
    return None if isinstance(outcome, Failure) else _lowered(compiled, outcome, max_limit, failed)


def _lowered(compiled: Callable[[int], int | Failure], used: int, limit: int, failed: int) -> int:
    """A limit that compiles, or that which the program needed with it, if that compiles too."""
    needed = _mib(used)
    return needed if failed < needed < limit and not isinstance(compiled(needed), Failure) else limit


def _mib(size: int) -> int:
    return -(-size // _MIB) * _MIB


def _stages(config: OperationConfig) -> Iterator[dict[str, int]]:
    stages = _sizes(config, "num_stages")
    for max_stages in range(max(stages.values(), default=1) - 1, 0, -1):
        yield {n: min(v, max_stages) for n, v in stages.items()}
    for changes in _smaller(config, _OF_GPU):
        yield changes | dict.fromkeys(stages, 1)


def _smaller(config: OperationConfig, minimum: int) -> Iterator[dict[str, int]]:
    blocks = _sizes(config, "block_")
    for shrink in (2, 4, 8, 16):
        yield {n: min(v, max(minimum, v // shrink // minimum * minimum)) for n, v in blocks.items()}


def _sizes(config: OperationConfig, prefix: str) -> dict[str, int]:
    return {n: v for n, v in config.every_field().items() if n.startswith(prefix) and isinstance(v, int)}
