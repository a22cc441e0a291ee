"""RecurrenceSearch: the chunks of a planned recurrence, by static clock or by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..operators.recurrent import RecurrentOperation
from ..planning import OperationConfig, PlannedOperation
from ..planning.recurrent.inside import repeats_keys
from ..planning.recurrent.planner import RECURRENCES
from ..planning.tables.table_plan import TablePlacement
from ..planning.tables.table_problem import TableProblem
from ..planning.tuning import config_with
from ..registry import OperationMetadata, OperationRegistry
from .recurrent_call import recurrence
from .search import Scheduled, Search
from .static_clock import Region

__all__ = ["LocalRecurrence", "RecurrenceSearch"]

_DECAYS, _STRENGTHS = ("decay", "A"), ("beta", "dt")


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
        static |= {"mode": problem.mode.strip("_"), "layout": problem.layout}
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
        del kernel
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


class RecurrenceSearch(Search):
    """A planned recurrence: its forward pass or, in mode train, that with its gradient, which goes by the same chunks."""

    def __init__(
        self, operation: type[PlannedOperation], method: str, problem: TableProblem, placement: TablePlacement
    ) -> None:
        self.operation, self.method, self.problem, self.placement = operation, method, problem, placement
        self.local = LocalRecurrence.of(problem, placement)
        self.key = RECURRENCES.tune_key(method, problem, placement)
        self.device_kind = problem.device_kind

    def candidates(self, how: str) -> Mapping[str, tuple[dict[str, Any], ...]]:
        del how
        runs: Any = self.operation.implementation(self.method, self.problem.config)
        candidates: Mapping[str, tuple[dict[str, Any], ...]] = runs.candidates(self.problem, self.placement)
        return candidates

    def resolve(self, fields: Mapping[str, Any]) -> OperationConfig:
        return config_with(self.operation, self.method, self.problem, self.placement, fields)

    def program(self, part: str, fields: Mapping[str, Any]) -> Callable[[], Any]:
        function, _ = self.local.program(fields, part)
        return partial(jax.jit(function), self.local.drawn())

    def scheduled(self, part: str, fields: dict[str, Any]) -> Scheduled:
        del part
        candidate = replace(self.problem, config=self.problem.config.with_fields(fields))
        runs: Any = self.operation.implementation(self.method, candidate.config)
        steps = runs.grid_steps(candidate, self.placement, runs.resolve(candidate, self.placement))
        return Scheduled(self.local, fields, {name: partial(_times, count) for name, count in steps.items()})


def _times(steps: int, cycles: int) -> int:
    return steps * cycles
