"""RunnableRecurrence: a declared call of a recurrent operation on this machine's devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..planning.tables.table_plan import TablePlan
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from ..verify.closeness import row_sizes
from ..verify.recurrent_of_call import recurrent_reference
from .check import Comparison, Worst, tolerance_of
from .progress import ReportProgress
from .ran import Runnable
from .run_call import Compiled, compile_call
from .target import run_metadata

__all__ = ["RunnableRecurrence"]


class RunnableRecurrence(Runnable):
    """Its arrays are drawn. Errors: those of planning, and RefusedError if nothing can run it."""

    def __init__(self, declaration: Declaration, mesh: str | None, mode: str | None, seed: int) -> None:
        kind: Any = OperationRegistry.get(declaration.operation)
        self.operation = kind(run_metadata(declaration, mesh=mesh))
        self.arrays: dict[str, Any] = dict(declaration.draw(seed))
        self.notes = (f"inputs drawn at random, seed {seed}",)
        self.declaration, self.mode = declaration, mode
        plan: TablePlan = self.operation.plan(**declaration.call_arguments(self.arrays, mode=mode)).require()
        self.table_plan = self.plan = plan

    def compile(self) -> Compiled:
        devices, specs = self.operation.metadata.mesh, self.table_plan.specs
        placed = {
            name: jax.device_put(x, NamedSharding(devices, specs[name]) if isinstance(devices, Mesh) else None)
            for name, x in self.arrays.items()
        }

        def run(arrays: dict[str, Any]) -> Any:
            return self.operation(**self.declaration.call_arguments(arrays, mode=self.mode))

        return compile_call(run, (placed,))

    def check(self, output: Any, progress: ReportProgress) -> list[Comparison]:
        """Outputs and state against the float64 reference."""
        plan = self.table_plan
        progress(0, 1, "calls")
        wanted = recurrent_reference(plan.problem, self.arrays, self.operation, plan.config)
        found = {"output": output.attention_outputs, "state": output.state}
        compared = []
        for name, x in found.items():
            want = wanted["attention_outputs" if name == "output" else name]
            worst = Worst(plan.problem.input_dtype)
            typical = np.sqrt(np.mean(np.square(want)))  # a row may be small because its terms cancel
            worst.add(np.asarray(x, np.float64), want, row_sizes(want, np.full(want.shape, typical)))
            compared.append(worst.compared(name, "float64 reference", tolerance_of(plan), ""))
        return compared
