"""RunnableCall: a declared call on this machine's devices, for `attnops run` and for a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..planning import Plan
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from .call_arrays import call_arrays
from .check import Comparison, check
from .compared import Compared, compare
from .materials import canonical
from .progress import Told
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

    def compare(self) -> Compared:
        return compare(self.call, self.placed)

    def check(self, output: Any, told: Told) -> list[Comparison]:
        return check(self.call, output, self.arrays, self.expected, self.source, told)

    def agreement(self, output: Any, compared: Compared | None) -> str:
        """Fully masked rows are left out: they are 0 here, and the mean of the values there."""
        if compared is None or compared.compiled is None:
            return ""
        problem = self.call.problem
        ours = canonical(np.asarray(output.attention_outputs, np.float32), problem.layout)
        other = np.asarray(compared.compiled.result, np.float32)
        live: np.ndarray = np.ones(ours.shape[:-1], bool)
        if problem.mask.may_have_dead_rows(problem.q_len, problem.kv_len):
            live = np.asarray(ours.any(axis=-1))
        ours, other = ours[live], other[live]
        finite = np.isfinite(ours) & np.isfinite(other)
        text = f"differs by at most {float(np.abs(ours[finite] - other[finite]).max(initial=0.0)):.1e}"
        text += "" if live.all() else f", {int((~live).sum())} fully masked rows left out"
        return text if finite.all() else f"{text}, {int((~finite).sum())} values that are not finite left out"
