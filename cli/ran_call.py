"""Calls of operations on this machine's devices, for `attnops run` and for a report; RunnableCall: one of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

__all__ = ["RunnableCall", "RunnableOperation"]


class RunnableOperation(Runnable):
    """A declared call. Errors: those of planning, and RefusedError if nothing can run it."""

    def __init__(
        self, declaration: Declaration, inputs: Path | None, mesh: str | None, mode: str | None, seed: int
    ) -> None:
        kind: Any = OperationRegistry.get(declaration.operation)
        self.operation = kind(run_metadata(declaration, mesh=mesh))
        self.declaration, self.mode = declaration, mode
        self.read(inputs, seed)
        self.plan = self.operation.plan(**declaration.call_arguments(self.arrays, mode=mode)).require()
        self.placed = on_devices(self.arrays, self.plan, self.operation.metadata.mesh)

    def read(self, inputs: Path | None, seed: int) -> None:
        """Draw the arrays, or read them from a file."""
        raise NotImplementedError

    def compile(self) -> Compiled:
        return compile_declared(self.operation, self.declaration, self.placed, self.mode)


class RunnableCall(RunnableOperation):
    """Its arrays are drawn, or read from a file."""

    plan: Plan

    def read(self, inputs: Path | None, seed: int) -> None:
        self.arrays, self.expected, self.notes = call_arrays(self.declaration, inputs, seed)
        if self.expected is not None:
            self.unchecked = ("expected is in the inputs file; --check compares with it",)
        self.source = "" if inputs is None else inputs.name

    def compare(self, output: Any) -> Compared:
        return compare(self.plan, self.placed, output)

    def check(self, output: Any, progress: ReportProgress) -> list[Comparison]:
        arrays = held_captures(self.declaration.call.score, self.plan.problem.q_heads) | self.arrays
        return check(self.plan, output, arrays, self.expected, self.source, progress)
