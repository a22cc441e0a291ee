"""PlannedRecurrence: a planned call of a recurrent operation as programs to compile, and all that it has to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..operators.recurrent import RecurrentOperation
from ..planning.recurrent.traffic import recurrence_traffic
from ..planning.tables.table_plan import TablePlan
from ..planning.traffic import Traffic
from .collectives import Collective
from .differences import differences
from .local_recurrence import recurrence, scheduled_recurrence
from .passes import Planned, Work
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
        trains = self.call.problem.mode == "__train__"
        self.names = ("forward", "forward and backward") if trains else ("forward",)

    def traced(self, name: str) -> Any:
        """Every array laid out as planned; backward also the gradients of outputs and state, and all gradients where their arrays
        are, so that all that is sent is the recurrence's."""
        every = self.operation.flat(self.arguments)
        arrays = {name: self._laid_out(name, x) for name, x in every.items() if hasattr(x, "shape")}
        static = {name: x for name, x in every.items() if name not in arrays}
        run = recurrence(self.operation, static, False)
        if (state := arrays.pop("state", None)) is not None:  # the slots of a step, which it writes in place
            return jax.jit(lambda state, rest: run(rest | {"state": state}), donate_argnums=0).trace(state, arrays)
        if "backward" not in name:
            return jax.jit(run).trace(arrays)
        table = self.operation.operands
        smooth = {name: x for name, x in arrays.items() if is_differentiable(name, x, table)}
        rest = {name: x for name, x in arrays.items() if name not in smooth}
        results = tuple(map(self._laid_out, ("attention_outputs", "state"), jax.eval_shape(run, arrays)))

        def both(smooth: dict[str, Any], rest: dict[str, Any], gradients: tuple[jax.Array, ...]) -> Any:
            found, back = jax.vjp(lambda some: run(some | rest), smooth)
            return found, back(gradients)[0]

        where = None
        if isinstance(self.mesh, Mesh):
            where = tuple(x.sharding for x in results), {name: x.sharding for name, x in smooth.items()}
        return jax.jit(both, out_shardings=where).trace(smooth, rest, results)

    def _laid_out(self, name: str, x: Any) -> jax.ShapeDtypeStruct:
        sharding = None if self.mesh is None else NamedSharding(self.mesh, self.call.specs[name])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def work(self, name: str, counted: Any, ends: int, loops: bool) -> Work:
        if counted is not None and not loops:
            return Work(float(counted.get("flops", 0.0)), float(counted.get("bytes accessed", 0.0)))
        flops = self.operation.flops(self.call) * (3 if "backward" in name else 1)
        return Work(flops, 0.0 if counted is not None else float(ends), counted is not None)

    def traffic(self, name: str) -> Traffic:
        placement, problem = self.call.placement, self.call.problem
        return recurrence_traffic(type(self.operation), problem, placement, "backward" in name)

    def differences(self, required: Traffic, sent: tuple[Collective, ...]) -> tuple[str, ...]:
        return differences(required, sent)

    def scheduled(self, name: str) -> Scheduled:
        problem, method, config = self.call.problem, self.call.method, self.call.config
        if method is None or not hasattr(self.call.runs, "grid_steps"):
            return super().scheduled(name)
        # A forward pass alone has another kernel than one that keeps what a gradient reads, and the same chunks.
        if problem.mode == "__train__" and "backward" not in name:
            problem = replace(problem, mode="__prefill__")
        fields = {"chunk_size": config.chunk_size} if hasattr(config, "chunk_size") else {}
        return scheduled_recurrence(type(self.operation), method, problem, self.call.placement, fields)
