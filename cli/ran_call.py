"""RunnableCall: a declared call on this machine's devices, for `attnops run` and for a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ..planning import Plan
from ..planning.score_operands import held_captures
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from .call_arrays import call_arrays
from .check import Comparison, check
from .compared import Compared, compare
from .progress import ReportProgress
from .ran import Runnable
from .run_call import Compiled, compile_declared, on_devices
from .target import run_metadata

__all__ = ["RunnableCall"]


class RunnableCall(Runnable):
    """Its arrays are drawn, or read from a file. Errors: those of planning, and RefusedError if nothing can run it."""

    def __init__(
        self, declaration: Declaration, inputs: Path | None, mesh: str | None, mode: str | None, seed: int
    ) -> None:
        kind: Any = OperationRegistry.get(declaration.operation)
        self.operation = kind(run_metadata(declaration, mesh=mesh))
        self.arrays, self.expected, self.notes = call_arrays(declaration, inputs, seed)
        if self.expected is not None:
            self.unchecked = ("expected is in the inputs file; --check compares with it",)
        self.source = "" if inputs is None else inputs.name
        self.declaration, self.mode = declaration, mode
        arguments = declaration.call_arguments(self.arrays, mode=mode)
        plan: Plan = self.operation.plan(**arguments).require()
        self.call = self.plan = plan
        devices = self.operation.metadata.mesh
        self.placed = on_devices(self.arrays, plan, devices if isinstance(devices, Mesh) else None)

    def compile(self) -> Compiled:
        return compile_declared(self.operation, self.declaration, self.placed, self.mode)

    def compare(self, output: Any) -> Compared:
        return compare(self.call, self.placed, output)

    def check(self, output: Any, progress: ReportProgress) -> list[Comparison]:
        arrays = held_captures(self.declaration.call.score, self.call.problem.q_heads) | self.arrays
        return check(self.call, output, arrays, self.expected, self.source, progress)
