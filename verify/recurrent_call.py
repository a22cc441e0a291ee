"""PlannedRecurrence: a planned call of a recurrent operation as programs to compile, and all that it has to send."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..operators.recurrent import RecurrentOperation
from ..planning.recurrent.planner import repeats_keys, sent_bytes
from ..planning.tables.table_plan import TablePlan
from ..planning.traffic import Need, Traffic
from .collectives import Collective
from .differences import differences
from .passes import Planned, Work

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
        """Every array laid out as planned."""
        every = self.operation.flat(self.arguments)
        arrays = {name: self._laid_out(name, x) for name, x in every.items() if hasattr(x, "shape")}
        static = {name: x for name, x in every.items() if name not in arrays}
        return jax.jit(recurrence(self.operation, static, "backward" in name)).trace(arrays)

    def _laid_out(self, name: str, x: Any) -> jax.ShapeDtypeStruct:
        sharding = None if self.mesh is None else NamedSharding(self.mesh, self.call.specs[name])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def work(self, name: str, counted: Any, ends: int, loops: bool) -> Work:
        if counted is not None and not loops:
            return Work(float(counted.get("flops", 0.0)), float(counted.get("bytes accessed", 0.0)))
        flops = self.operation.flops(self.call) * (3 if "backward" in name else 1)
        return Work(flops, 0.0 if counted is not None else float(ends), counted is not None)

    def traffic(self, name: str) -> Traffic:
        """The maps of the other devices, or their tokens; a gradient's own traffic is left to the compiler."""
        placement, problem = self.call.placement, self.call.problem
        if problem.devices == 1:
            return Traffic(())
        if "backward" in name:
            return Traffic((), ("what the gradient of a recurrence sends isn't counted",))
        if ("width" in problem.size and placement.over) or repeats_keys(placement):
            return Traffic((), ("what is sent between neighbours isn't counted",))
        if not placement.over:
            return Traffic(())
        sizes = {axis.name: axis.size for axis in problem.mesh}
        devices = math.prod(sizes[axis] for axis in placement.over)
        if placement.strategy == "state":
            sent = sent_bytes(self.operation, placement, devices)
            return Traffic((Need("all-gather", sent, "the maps of states", axes=placement.over),))
        needs = []
        for x in placement.tensors:
            if "q_len" in x.dims and x.tensor != "attention_outputs" and x.axes(x.dims.index("q_len")):
                needs.append(Need("all-gather", x.local_bytes * (devices - 1), x.tensor, axes=placement.over))
        return Traffic(tuple(needs))

    def differences(self, required: Traffic, sent: tuple[Collective, ...]) -> tuple[str, ...]:
        return differences(required, sent)
