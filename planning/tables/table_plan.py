"""TablePlan: what was decided for a call that follows from its table of operands, as text and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...errors import RefusedShardingError
from ...sharding import FittedSpec, MeshAxis, TensorShape, fit_tensor
from ..decision import WHY, Decision
from ..notes import is_info
from ..policy import Policy
from ..text import bytes_text, spec_text
from .table_problem import TableProblem

__all__ = ["TablePlacement", "TablePlan", "fitted_tensors", "refuse_unfit", "table_rows"]


class TablePlacement(NamedTuple):
    """Where the arrays of a call and its results are. strategy: what is done about a split sequence, '' if it isn't split; over:
    the mesh axes that split it; manual: whether the caller's own shard_map does."""

    tensors: tuple[FittedSpec, ...]
    strategy: str = ""
    over: tuple[str, ...] = ()
    manual: bool = False

    def axes(self, tensor: str, dim: str) -> tuple[str, ...]:
        """The mesh axes that split a dim of a tensor; () for a tensor that the call doesn't have."""
        for fitted in self.tensors:
            if fitted.tensor == tensor and dim in fitted.dims:
                return fitted.axes(fitted.dims.index(dim))
        return ()

    def idle(self, mesh: tuple[MeshAxis, ...]) -> list[str]:
        """`tp=2` for each mesh axis that splits nothing: all its devices do the same work."""
        used = {axis for fitted in self.tensors for at in range(len(fitted.dims)) for axis in fitted.axes(at)}
        return [f"{x.name}={x.size}" for x in mesh if x.size > 1 and x.kind != "manual" and x.name not in used]


@dataclass(frozen=True, eq=False, repr=False)
class TablePlan(Decision[TableProblem, TablePlacement]):
    """The plan of a call that follows from its table of operands."""

    @property
    def tensors(self) -> tuple[FittedSpec, ...]:
        """The call's arrays and its results."""
        return self.placement.tensors

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """The spec of each array and result, by name."""
        return MappingProxyType({fitted.tensor: fitted.spec for fitted in self.tensors})

    def explain(self, verbose: bool = False) -> str:
        """The decision as text: what runs and why, and what needs your attention."""
        problem = self.problem
        lines = [problem.describe(), f"runs      {self.implementation or 'nothing'} ({WHY[self.kind]})"]
        lines += [f"{label:<9} {line}" for label, line in table_rows(self)]
        for rejected in self.rejected:
            lines.append(f"not       {rejected.implementation}:")
            lines.extend(f"            {reason}" for reason in rejected.reasons)
        if verbose or math.prod(axis.size for axis in problem.mesh) > 1:
            lines.append("tensors   spec, shape -> per device, bytes per device")
            width = max(len(x.tensor) for x in self.tensors)
            for x in self.tensors:
                shapes = "x".join(map(str, x.shape)), "x".join(map(str, x.local_shape))
                lines.append(
                    f"  {x.tensor:<{width}} {spec_text(x.spec)}  {shapes[0]} -> {shapes[1]}  {bytes_text(x.local_bytes)}"
                )
        if verbose:
            lines += [f"config    {line}" for line in self.config_lines()]
        return "\n".join([*lines, *(f"note      {x}" for x in self.notes if verbose or not is_info(x))])

    def to_dict(self) -> dict[str, Any]:
        """The whole decision as JSON-ready values."""
        return self.decision_dict() | {
            "sequence": {"strategy": self.placement.strategy or None, "axes": list(self.placement.over)},
            "tensors": {
                x.tensor: {
                    "spec": spec_text(x.spec),
                    "shape": list(x.shape),
                    "local_shape": list(x.local_shape),
                    "local_bytes": x.local_bytes,
                }
                for x in self.tensors
            },
        }


def table_rows(plan: TablePlan) -> list[tuple[str, str]]:
    """The labelled lines after what runs."""
    problem, placement = plan.problem, plan.placement
    rows = [("platform", f"{problem.platform}, from {problem.platform_source}")]
    rows += [(name, f"{x:g}" if isinstance(x, float) else str(x)) for name, x in problem.options if x is not None]
    if placement.strategy:
        rows.append(("sequence", f"{placement.strategy} over {'+'.join(placement.over)}"))
    lines = [] if plan.method is None else [line for line in plan.config_lines() if line.origin != "default"]
    return rows + ([("config", ", ".join(lines))] if lines else [])


def fitted_tensors(problem: TableProblem) -> tuple[FittedSpec, ...]:
    """Every array and result, with its declared spec fitted to the mesh."""
    tensors = []
    for x in (*problem.operands, *problem.results):
        shape = TensorShape(x.shape, jnp.dtype(x.dtype).itemsize)
        spec = PartitionSpec() if x.declared is None else x.declared
        options = (x.operand.dims_in(problem.layout), *x.operand.also)
        dims = next(dims for dims in options if len(dims) == len(x.shape))
        tensors.append(fit_tensor(x.name, spec, shape, dims, problem.mesh))
    return tuple(tensors)


def refuse_unfit(problem: TableProblem, placement: TablePlacement, policy: Policy) -> None:
    """Errors: ShardingError for what `strict` refuses: axes that don't fit, and those that only repeat work."""
    if not policy.strict:
        return
    unfit = [
        f"{x.tensor}: {drop.axis!r}: {drop.reason}"
        for x in placement.tensors
        for drop in x.dropped
        if not drop.harmless
    ]
    if idle := placement.idle(problem.mesh):
        unfit.append(f"{', '.join(idle)} split nothing")
    if unfit:
        raise RefusedShardingError(f"strict: {problem.describe()}: " + "; ".join(unfit) + ".")
