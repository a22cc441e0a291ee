"""run_step: a planned step over pages as one jitted function; equal steps of all layers share its program."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ...masks.causal_window import causal_window
from ...planning import PlannedOperation
from ...planning.paged.paged_plan import PagedPlan
from ...sharding.mesh import AnyMesh
from ..paged_cache.attend import attend
from ..paged_cache.batch import RaggedBatch
from ..paged_cache.insert import insert
from ..paged_cache.paged_call import PagedSizes
from ..paged_cache.state import CacheState
from .step_arguments import StepArrays

__all__ = ["StepProgram", "run_step"]


class StepProgram:
    """Everything static in a step. Compared by value; the hash is computed once."""

    __slots__ = ("_hash", "debug", "mesh", "operation", "plan")

    def __init__(self, operation: PlannedOperation, plan: PagedPlan, mesh: AnyMesh | None, debug: bool) -> None:
        self.operation, self.plan, self.mesh, self.debug = operation, plan, mesh, debug
        self._hash = hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.operation, self.plan, self.mesh, self.debug

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StepProgram) and self._key() == other._key())

    def __hash__(self) -> int:
        return self._hash


def written_when(operation: type[PlannedOperation], plan: PagedPlan) -> Literal["before", "fused", "none"]:
    """When a plan's tokens are written: 'fused' only if its method does that."""
    problem = plan.problem
    if problem.update == "none":
        return "none"
    return "fused" if problem.update == "fused" and operation.capability(plan.method or "").writes_pages else "before"


@functools.partial(jax.jit, static_argnums=0)
def run_step(
    program: StepProgram, state: CacheState, batch: RaggedBatch, query: Any, key: Any, value: Any, arrays: StepArrays
) -> tuple[jax.Array | None, jax.Array | None, CacheState]:
    """(output, lse, the state after) of one layer, which is the state's only one. This is its name in a profile."""
    problem, config = program.plan.problem, program.plan.config
    scales = {"key_scale": arrays.key_scale, "value_scale": arrays.value_scale}
    if problem.mode == "insert":
        return None, None, insert(state, 0, batch, key, value, **scales, debug=program.debug)
    found = causal_window(problem.mask)
    assert found is not None  # otherwise nothing would run it
    causal, window = found.causal, found.window
    made = attend(
        state,
        0,
        batch,
        jnp.asarray(query, problem.runtime_dtype),
        key,
        value,
        **scales,
        update=written_when(type(program.operation), program.plan),
        mesh=program.mesh,
        kv_heads=program.plan.policy.kv_heads,
        softmax_scale=problem.softmax_scale,
        causal=causal,
        sliding_window=window,
        logits_soft_cap=problem.logits_soft_cap,
        sinks=arrays.sinks,
        max_q_len=problem.max_q_len,
        debug=program.debug,
        method=getattr(program.operation, program.plan.method or ""),
        platform=problem.platform,
        sizes=PagedSizes(**{name: getattr(config, name) for name in PagedSizes._fields if hasattr(config, name)}),
        check_vma=program.operation.capability(program.plan.method or "").check_vma,
    )
    return made.output, made.lse, made.state
