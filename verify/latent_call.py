"""A planned latent attention, with its projections, as programs to compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..operators import Operation
from ..operators.latent import (
    LATENT,
    Choice,
    LatentAttention,
    LatentPlan,
    dim_sizes,
    form_notes,
    names_of,
    projection_flops,
    projection_needs,
)
from ..planning.traffic import Traffic
from ..registry.latent_dims import LatentDims
from .call import PlannedCall
from .call_program import call_program

__all__ = ["PlannedLatent"]

_INSIDE = ("query", "key", "value")


class PlannedLatent(PlannedCall):
    """A latent attention as a model calls it: from the latents, with the projections of one form, and with the gradients of all
    its arrays. `plan` is that of the attention inside.

    operation, arguments: those of the attention inside, in the form of the choice.
    """

    def __init__(self, operation: Operation, arguments: Mapping[str, Any], dims: LatentDims, choice: Choice) -> None:
        super().__init__(operation, arguments)
        self.latent = LatentPlan(dims, choice, self.call)
        self.plan = replace(self.call, notes=(*self.call.notes, *form_notes(dims, choice, self.call)))

    def traced(self, name: str) -> Any:
        dims = self.latent.dims.model_dump() | {"form": self.latent.form}
        attend = LatentAttention(self.operation.name, **dims, metadata=self.operation.metadata)
        rest = {name: x for name, x in self.arguments.items() if name not in _INSIDE}
        if self.latent.dims.query_latent_dim is not None:
            rest |= {"q_nope": None, "q_rope": None}
        specs, placement = self.latent.specs, self.call.placement

        def spec_of(name: str, shape: tuple[int, ...]) -> PartitionSpec:
            return specs[name] if name in LATENT else placement.call_spec(name, shape)

        program, arrays = call_program(attend, self._shapes() | rest, self.call, "backward" in name, spec_of)
        return program.trace(arrays)

    def flops(self, name: str) -> float:
        problem, dims = self.call.problem, self.latent.dims
        tokens, keys = problem.batch * problem.q_len, problem.batch * problem.kv_len
        products = projection_flops(dims, self.latent.form, self.latent.choice.folded, tokens, keys, dims.heads)
        return super().flops(name) + products * (3 if "backward" in name else 1) / problem.devices

    def traffic(self, name: str) -> Traffic:
        inside = super().traffic(name)
        around = projection_needs(self.latent) if "backward" in name else ()
        return Traffic((*inside.needs, *around), inside.unknown)

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        problem, dims = self.call.problem, self.latent.dims
        sizes = dim_sizes(dims) | {"batch": problem.batch, "q_len": problem.q_len, "kv_len": problem.kv_len}
        queries = {"q_nope", "q_rope", "query_latent", "q_cos", "q_sin"}
        dtypes = {name: problem.input_dtype if name in queries else problem.key_dtype for name in names_of(dims)}
        return {
            name: jax.ShapeDtypeStruct(LATENT[name].shape(sizes, problem.layout), jnp.dtype(dtype))
            for name, dtype in dtypes.items()
        }
