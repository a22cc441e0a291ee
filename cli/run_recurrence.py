"""RunnableRecurrence: a declared call of a recurrent operation on this machine's devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..planning.tables.table_plan import TablePlan
from ..verify.closeness import row_sizes
from ..verify.recurrent_of_call import recurrent_reference
from .check import Comparison, Worst, tolerance_of
from .progress import ReportProgress
from .ran_call import RunnableOperation
from .step import refuse_inputs

__all__ = ["RunnableRecurrence"]


class RunnableRecurrence(RunnableOperation):
    """Its arrays are drawn."""

    plan: TablePlan

    def read(self, inputs: Path | None, seed: int) -> None:
        refuse_inputs(inputs)
        self.arrays = dict(self.declaration.draw(seed))
        self.notes = (f"inputs drawn at random, seed {seed}",)

    def check(self, output: Any, progress: ReportProgress) -> list[Comparison]:
        """Outputs, state and windows against the float64 reference."""
        plan = self.plan
        progress(0, 1, "calls")
        wanted = recurrent_reference(plan.problem, self.arrays, self.operation, plan.config)
        found = {"output": output.attention_outputs, "state": output.state, **output.windows}
        compared = []
        for name, x in found.items():
            want = wanted["attention_outputs" if name == "output" else name]
            worst = Worst(plan.problem.input_dtype)
            typical = np.sqrt(np.mean(np.square(want)))  # a row may be small because its terms cancel
            worst.add(np.asarray(x, np.float64), want, row_sizes(want, np.full(want.shape, typical)))
            compared.append(worst.compared(name, "float64 reference", tolerance_of(plan), ""))
        return compared
