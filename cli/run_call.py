"""Compile, run and time one declared call on this machine's devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from ..registry.declaration import Declaration
from ..verify.report import AnyPlan
from .progress import ReportProgress

__all__ = ["Compiled", "TooLarge", "compile_call", "compile_declared", "on_devices", "time_calls"]


class Compiled(NamedTuple):
    """A compiled call, its first result, the seconds to compile it, and bytes of temporary memory per device."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: Any
    compile_seconds: float
    temp_bytes: int | None


def compile_declared(operation: Any, declaration: Declaration, arrays: Mapping[str, Any], mode: str | None) -> Compiled:
    """Compile and run the declared call on arrays from `on_devices`; `result` is the operation's own, such as AttentionOutput."""

    def run(arrays: dict[str, Any]) -> Any:
        return operation(**declaration.call_arguments(arrays, mode=mode))

    return compile_call(run, (dict(arrays),))


class TooLarge(Exception):
    """A compiled call needs more temporary memory than allowed: `bytes` per device."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.bytes = needed


def compile_call(function: Callable[..., Any], arguments: tuple[Any, ...], *, max_bytes: int | None = None) -> Compiled:
    """Compile ahead of time and run once, which also warms up. Errors: TooLarge, before it runs, beyond `max_bytes` bytes."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temporary = None if memory is None else int(memory.temp_size_in_bytes)
    if max_bytes is not None and temporary is not None and temporary > max_bytes:
        raise TooLarge(temporary)
    result = jax.block_until_ready(compiled(*arguments))
    return Compiled(compiled, arguments, result, seconds, temporary)


def time_calls(calls: Sequence[Compiled], repeats: int, progress: ReportProgress | None = None) -> list[float]:
    """Median seconds of each call. The calls take turns, so that load on the machine affects all of them. `progress` is called
    after each turn."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        if progress is not None:
            progress(turn, repeats, "")
        for durations, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call.call(*call.arguments))
            durations.append(time.perf_counter() - start)
    return [statistics.median(durations) for durations in times]


def on_devices(arrays: Mapping[str, Any], plan: AnyPlan, mesh: Any) -> dict[str, jax.Array]:
    """Place every array by its fitted spec on a mesh of devices, before anything is timed."""
    if not isinstance(mesh, Mesh):
        return {name: jax.device_put(x) for name, x in arrays.items()}
    return {name: jax.device_put(x, NamedSharding(mesh, plan.spec_of(name, x.shape))) for name, x in arrays.items()}
