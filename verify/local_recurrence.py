"""LocalRecurrence: one device's part of a planned recurrence, for a process that reads its kernels' schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..operators.recurrent import RecurrentOperation
from ..planning import PlannedOperation
from ..planning.recurrent.inside import repeats_keys
from ..planning.tables.table_plan import TablePlacement
from ..planning.tables.table_problem import TableProblem
from ..registry import OperationMetadata, OperationRegistry
from .search import Scheduled
from .static_clock import Region

__all__ = ["LocalRecurrence", "recurrence", "scheduled_recurrence"]

_DECAYS, _STRENGTHS = ("decay", "A"), ("beta", "dt")


def recurrence(
    operation: RecurrentOperation, static: Mapping[str, Any], gradient: bool
) -> Callable[[dict[str, Any]], Any]:
    """A call as a function of its arrays by name: its outputs, its state and windows, or the sum of all and its gradients."""

    def run(arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        found: Any = operation(**operation.packed(arrays | static))  # type: ignore[operator]
        return found.attention_outputs, found.state, *found.windows.values()

    def loss(some: dict[str, Any], rest: dict[str, Any]) -> jax.Array:
        return sum((x.astype(jnp.float32).sum() for x in run(some | rest)), start=jnp.float32(0))

    def both(arrays: dict[str, Any]) -> Any:
        smooth = {name: x for name, x in arrays.items() if operation.operands[name].gradient}
        return jax.value_and_grad(loss)(smooth, {name: x for name, x in arrays.items() if name not in smooth})

    return both if gradient else run


@dataclass(frozen=True)
class LocalRecurrence:
    """One device's tokens, rows and heads as a call without a mesh. It can be pickled: `metadata` is JSON values, `arrays` hold
    ShapeDtypeStructs, `static` has the other arguments. Of a sequence whose states are passed on it is the second turn, for
    outputs."""

    operation: str
    metadata: dict[str, Any]
    arrays: dict[str, Any]
    static: dict[str, Any]

    @classmethod
    def of(cls, problem: TableProblem, placement: TablePlacement) -> LocalRecurrence:
        """The part of one device."""
        dtypes = {x.operand.name: jnp.dtype(x.dtype) for x in problem.operands}
        shapes = {x.tensor: (x.dims, x.local_shape) for x in placement.tensors if x.tensor in dtypes}
        heads = next(dict(zip(x.dims, x.local_shape, strict=True)) for x in placement.tensors if x.tensor == "state")
        again = {"kv_heads": heads["heads"]} if repeats_keys(placement) else {}

        def cut(name: str) -> jax.ShapeDtypeStruct:
            pairs = zip(*shapes[name], strict=True)
            return jax.ShapeDtypeStruct(tuple(again.get(dim, n) for dim, n in pairs), dtypes[name])

        metadata = {
            "operation_configs": {problem.config.operation: problem.config.to_dict()},
            "fallback": "error",
            "tuning": "off",
        }
        static = {name: value for name, value in problem.options if value is not None}
        shared = {"mode": problem.mode.strip("_"), "layout": problem.layout}
        kind: Any = OperationRegistry.get(problem.operation)
        static |= {name: value for name, value in shared.items() if name in kind.static}
        return cls(problem.operation, metadata, {name: cut(name) for name in shapes}, static)

    def program(self, fields: Mapping[str, Any], part: str, mesh: Any = None) -> tuple[Any, list[Any]]:
        """(function of the arrays, their shapes): the call or, for part 'backward', its gradient."""
        metadata = OperationMetadata.from_dict(self.metadata).replace(mesh=mesh)
        ((of, config),) = metadata.operation_configs.items()
        kind: Any = OperationRegistry.get(self.operation)
        operation: RecurrentOperation = kind(metadata.replace(operation_configs={of: config.with_fields(fields)}))
        run = recurrence(operation, self.static, part == "backward")
        return lambda arrays: run(dict(zip(self.arrays, arrays, strict=True))), list(self.arrays.values())

    def read(self, kernel: str, root: Region) -> int:
        """The cycles of a step of a kernel's grid: the loop around it, or all of a grid with one step."""
        return max((region.cycles for region in root.all() if region.is_loop), default=root.cycles)

    def drawn(self) -> list[jax.Array]:
        """Values to time it with: normal numbers, log decays below 0, strengths between 0 and 1; one document, all tokens."""
        keys = jax.random.split(jax.random.key(0), len(self.arrays))

        def draw(name: str, shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
            if not jnp.issubdtype(shape.dtype, jnp.floating):
                return jnp.full(shape.shape, jnp.iinfo(jnp.int16).max if name == "lengths" else 0, shape.dtype)
            normal = jax.random.normal(key, shape.shape, jnp.float32)
            changed = -jnp.exp(normal) if name in _DECAYS else jax.nn.sigmoid(normal) if name in _STRENGTHS else normal
            return changed.astype(shape.dtype)

        return [draw(name, x, key) for (name, x), key in zip(self.arrays.items(), keys, strict=True)]


def scheduled_recurrence(
    operation: type[PlannedOperation],
    method: str,
    problem: TableProblem,
    placement: TablePlacement,
    fields: Mapping[str, Any],
) -> Scheduled:
    """What is compiled for the static clock of a pass with these fields of its config."""
    candidate = replace(problem, config=problem.config.with_fields(fields))
    runs: Any = operation.implementation(method, candidate.config)
    steps = runs.grid_steps(candidate, placement, runs.resolve(candidate, placement))
    local = LocalRecurrence.of(problem, placement)
    return Scheduled(local, fields, {name: partial(_times, count) for name, count in steps.items()})


def _times(steps: int, cycles: int) -> int:
    return steps * cycles
