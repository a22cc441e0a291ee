"""PlannedRecurrence: a planned call of a recurrent operation as programs to compile, and all that it has to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..operators.recurrent import RecurrentOperation
from ..planning.recurrent.traffic import recurrence_traffic
from ..planning.tables.table_plan import TablePlan
from ..planning.traffic import Traffic
from .local_recurrence import recurrence, scheduled_recurrence
from .passes import Planned, names_of_passes
from .search import Scheduled
from .with_gradient import is_differentiable

__all__ = ["PlannedRecurrence"]


class PlannedRecurrence(Planned):
    """A planned recurrence: its forward pass and, in mode train, that with its gradient."""

    def __init__(self, operation: RecurrentOperation, arguments: Mapping[str, Any]) -> None:
        self.operation, self.arguments = operation, dict(arguments)
        self.call: TablePlan = operation.plan(**self.arguments)  # type: ignore[attr-defined]
        self.plan = self.call
        self.mesh = operation.metadata.mesh
        self.names = names_of_passes(self.call.problem.mode)

    def traced(self, name: str) -> Any:
        """Every array laid out as planned; backward also the gradients of outputs and state, and all gradients where their arrays
        are, so that all that is sent is the recurrence's."""
        every = self.operation.flat(self.arguments)
        specs = self.call.specs
        arrays = {name: self.laid_out(x, specs[name]) for name, x in every.items() if hasattr(x, "shape")}
        static = {name: x for name, x in every.items() if name not in arrays}
        run = recurrence(self.operation, static, False)
        written = {x.name for x in self.call.problem.results} & set(arrays)  # the slots of a step, in place
        if written:
            slots = {name: arrays.pop(name) for name in written}
            return jax.jit(lambda slots, rest: run(slots | rest), donate_argnums=0).trace(slots, arrays)
        if "backward" not in name:
            return jax.jit(run).trace(arrays)
        table = self.operation.operands
        smooth = {name: x for name, x in arrays.items() if is_differentiable(name, x, table)}
        rest = {name: x for name, x in arrays.items() if name not in smooth}
        where_results = specs["attention_outputs"], specs["state"]
        results = tuple(map(self.laid_out, jax.eval_shape(run, arrays), where_results))

        def both(smooth: dict[str, Any], rest: dict[str, Any], gradients: tuple[jax.Array, ...]) -> Any:
            found, back = jax.vjp(lambda some: run(some | rest), smooth)
            return found, back(gradients)[0]

        where = None
        if isinstance(self.mesh, Mesh):
            where = tuple(x.sharding for x in results), {name: x.sharding for name, x in smooth.items()}
        return jax.jit(both, out_shardings=where).trace(smooth, rest, results)

    def flops(self, name: str) -> float:
        return self.operation.flops(self.call) * (3 if "backward" in name else 1)

    def traffic(self, name: str) -> Traffic:
        placement, problem = self.call.placement, self.call.problem
        return recurrence_traffic(type(self.operation), problem, placement, "backward" in name)

    def scheduled(self, name: str) -> Scheduled:
        problem, method, runs = self.call.problem, self.call.method, self.call.runs
        if method is None or runs is None or not runs.static_clock:
            return super().scheduled(name)
        # A forward pass alone has another kernel than one that keeps what a gradient reads, and the same chunks.
        if problem.mode == "__train__" and "backward" not in name:
            problem = replace(problem, mode="__prefill__")
        config: Any = self.call.config
        fields = {"chunk_size": config.chunk_size}
        return scheduled_recurrence(type(self.operation), method, problem, self.call.placement, fields)
