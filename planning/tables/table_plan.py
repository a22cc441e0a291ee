"""TablePlan: what was decided for a call that follows from its table of operands, as text and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...sharding import FittedSpec, TensorShape, fit_tensor
from .fitted_plan import FittedPlan
from .table_problem import TableProblem

__all__ = ["TablePlacement", "TablePlan", "fitted_tensors"]


class TablePlacement(NamedTuple):
    """Where the arrays of a call and its results are. strategy: what is done about a split sequence, '' if it isn't split; over:
    the mesh axes that split it; manual: whether the caller's own shard_map does; exchange: how devices exchange what their tokens
    do to a state, '' if they don't."""

    tensors: tuple[FittedSpec, ...]
    strategy: str = ""
    over: tuple[str, ...] = ()
    manual: bool = False
    exchange: str = ""

    def axes(self, tensor: str, dim: str) -> tuple[str, ...]:
        """The mesh axes that split a dim of a tensor; () for a tensor that the call doesn't have."""
        for fitted in self.tensors:
            if fitted.tensor == tensor and dim in fitted.dims:
                return fitted.axes(fitted.dims.index(dim))
        return ()


@dataclass(frozen=True, eq=False, repr=False)
class TablePlan(FittedPlan[TableProblem, TablePlacement]):
    """The plan of a call that follows from its table of operands."""

    def rows(self, verbose: bool = False) -> list[tuple[str, str]]:
        """The labelled lines after what runs."""
        problem, placement = self.problem, self.placement
        rows = [("platform", f"{problem.platform}, from {problem.platform_source}")]
        rows += [(name, f"{x:g}" if isinstance(x, float) else str(x)) for name, x in problem.options if x is not None]
        if placement.strategy:
            by = f", by {placement.exchange}" if placement.exchange else ""
            rows.append(("sequence", f"{placement.strategy} over {'+'.join(placement.over)}{by}"))
        rows += self.config_rows(verbose)
        if self.tuning is not None and (verbose or self.tuning.source != "heuristic"):
            rows.append(("tuning", f"{self.tuning.source}: {self.tuning.why}"))
        return rows

    def facts(self) -> dict[str, Any]:
        """What is done about a split sequence."""
        placement = self.placement
        return {
            "sequence": {
                "strategy": placement.strategy or None,
                "axes": list(placement.over),
                "exchange": placement.exchange or None,
            }
        }


def fitted_tensors(problem: TableProblem) -> tuple[FittedSpec, ...]:
    """Every array and result, with its declared spec fitted to the mesh; once what is both, such as slots that a step writes."""
    tensors = []
    for x in (*problem.operands, *(x for x in problem.results if problem.operand(x.name) is None)):
        shape = TensorShape(x.shape, jnp.dtype(x.dtype).itemsize)
        spec = PartitionSpec() if x.declared is None else x.declared
        options = (x.operand.dims_in(problem.layout), *x.operand.also)
        dims = next(dims for dims in options if len(dims) == len(x.shape))
        tensors.append(fit_tensor(x.name, spec, shape, dims, problem.mesh))
    return tuple(tensors)
