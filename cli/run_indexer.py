"""RunnableIndexer: a declared call of an indexer on this machine's devices, for `attnops run` and for a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..masks.causal_window import causal_window
from ..planning.selection.index_plan import IndexPlan
from ..verify.selection_error import index_reference, selection_error, window_shows
from .check import Comparison, tolerance_of
from .index_inputs import index_inputs
from .progress import ReportProgress
from .ran_call import RunnableOperation

__all__ = ["RunnableIndexer"]

_PIECE = 2**20  # scores of one piece of the reference


class RunnableIndexer(RunnableOperation):
    """Its arrays are drawn, or read from a file."""

    plan: IndexPlan

    def read(self, inputs: Path | None, seed: int) -> None:
        self.arrays, self.notes = index_inputs(self.declaration, inputs, seed)

    def check(self, output: Any, progress: ReportProgress) -> list[Comparison]:
        """The selected scores against the float64 reference, a piece of the queries at a time."""
        problem, arrays = self.plan.problem, self.arrays
        window = causal_window(problem.mask)
        assert window is not None  # otherwise nothing would run it
        key = np.asarray(arrays["index_key"], np.float64)
        if "key_scale" in arrays:
            key = key * np.asarray(arrays["key_scale"], np.float64)[..., None]
        positions, counts = np.asarray(output.positions), np.asarray(output.counts)
        worst, relative = 0.0, 0.0
        step = max(1, _PIECE // problem.kv_len)
        for start in range(0, problem.q_len, step):
            rows = slice(start, min(start + step, problem.q_len))
            progress(start, problem.q_len, "queries")
            for row in range(problem.batch):
                query, weights = arrays["index_query"][row, rows], arrays["index_weights"][row, rows]
                scores, sizes = index_reference(query, key[row], weights, problem.softmax_scale)
                seen = window_shows(
                    np.arange(rows.start, rows.stop) + (problem.query_offset or 0), np.arange(problem.kv_len), window
                )
                if "kv_lengths" in arrays:
                    seen &= np.arange(problem.kv_len)[None] < arrays["kv_lengths"][row]
                if "q_segment_ids" in arrays:
                    seen &= arrays["q_segment_ids"][row, rows, None] == arrays["kv_segment_ids"][row][None]
                found = selection_error(positions[row, rows], counts[row, rows], scores, sizes, seen)
                worst, relative = max(worst, found[0]), max(relative, found[1])
        return [Comparison("selected scores", "float64 reference", worst, relative, tolerance_of(self.plan))]
