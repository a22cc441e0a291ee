"""PlannedRecurrence: a planned call of a recurrent operation as programs to compile, and all that it has to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ..operators.recurrent import RecurrentOperation
from ..planning.recurrent.traffic import recurrence_traffic
from ..planning.tables.table_plan import TablePlan
from ..planning.traffic import Traffic
from .collectives import Collective
from .differences import differences
from .passes import Planned, Work
from .with_gradient import is_differentiable

__all__ = ["PlannedRecurrence", "recurrence"]


def recurrence(
    operation: RecurrentOperation, static: Mapping[str, Any], gradient: bool
) -> Callable[[dict[str, Any]], Any]:
    """A call as a function of its arrays by name: its outputs and state, or the sum of both and its gradients."""

    def run(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        found: Any = operation(**operation.packed(arrays | static))  # type: ignore[operator]
        return found.attention_outputs, found.state

    def loss(some: dict[str, Any], rest: dict[str, Any]) -> jax.Array:
        return sum((x.astype(jnp.float32).sum() for x in run(some | rest)), start=jnp.float32(0))

    def both(arrays: dict[str, Any]) -> Any:
        smooth = {name: x for name, x in arrays.items() if operation.operands[name].gradient}
        return jax.value_and_grad(loss)(smooth, {name: x for name, x in arrays.items() if name not in smooth})

    return both if gradient else run


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
