"""PlannedIndexer: a planned call of an indexer as a program to compile, and all that it has to send."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from ..masks.causal_window import ANY_CAUSAL, causal_window
from ..operators.selection import Indexer
from ..planning.selection.index_operands import INDEX
from ..planning.selection.index_plan import IndexPlan
from ..planning.traffic import Need, Traffic
from .passes import Planned

__all__ = ["PlannedIndexer"]


class PlannedIndexer(Planned):
    """A planned selection: one pass. A selection has no gradient."""

    names = ("forward",)

    def __init__(self, operation: Indexer, arguments: Mapping[str, Any]) -> None:
        self.operation, self.arguments = operation, dict(arguments)
        self.index: IndexPlan = operation.plan(**self.arguments)
        self.plan = self.index
        self.mesh = operation.metadata.mesh

    def traced(self, name: str) -> Any:
        """Every array laid out as planned."""
        specs = self.index.specs
        arrays = {name: self.laid_out(x, specs[name]) for name, x in self.arguments.items() if hasattr(x, "shape")}
        static = {name: x for name, x in self.arguments.items() if name not in arrays}

        def select(arrays: dict[str, Any]) -> Any:
            found = self.operation(**arrays, **static)
            return found.positions, found.counts

        return jax.jit(select).trace(arrays)

    def flops(self, name: str) -> float:
        """A product and a weight of each head, for the pairs that the mask shows."""
        problem, placement = self.index.problem, self.index.placement
        causal, left, right = causal_window(problem.mask) or ANY_CAUSAL
        first = problem.query_offset or 0
        pairs = 0
        for row in range(first, first + problem.q_len):
            last = problem.kv_len - 1 if not causal else min(row, problem.kv_len - 1)
            last = last if right is None else min(last, row + right)
            pairs += max(0, last + 1 - (0 if left is None else max(0, row - left)))
        sizes = {axis.name: axis.size for axis in problem.mesh}
        split = math.prod(sizes[x] for at in (0, 1) for x in placement.axes("index_query", at))
        return 2.0 * pairs * problem.batch * problem.q_heads * (problem.index_dim + 1) / split

    def traffic(self, name: str) -> Traffic:
        """What lies split over the keys is gathered."""
        sizes = {axis.name: axis.size for axis in self.index.problem.mesh}
        needs = []
        for fitted in self.index.tensors:
            row = INDEX.get(fitted.tensor)
            if row is None or "kv_len" not in row.dims:
                continue
            if axes := fitted.axes(row.dims.index("kv_len")):
                sent = fitted.local_bytes * (math.prod(sizes[x] for x in axes) - 1)
                needs.append(Need("all-gather", sent, fitted.tensor, axes=axes))
        return Traffic(tuple(needs))
