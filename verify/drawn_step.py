"""A declared step with random arrays, ready to run on this machine's devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged.step_operation import StepOperation
from ..operators.paged_cache import CacheState, LayerPages, RaggedBatch, init, shardings
from ..planning.cache.cache_plan import CachePlan
from ..planning.cache.kv_cache import KVCache
from ..planning.paged.paged_plan import PagedPlan
from ..planning.paged.step_operands import step_spec

__all__ = ["DrawnStep", "array_specs", "draw_step", "plan_declared", "step_program"]

_AMPLITUDE = 40  # largest value drawn for int8 pages


class DrawnStep(NamedTuple):
    """`run(state, batch, arrays)` is the step of the declared layer; `arguments` are its arguments, placed; `arrays` the arrays
    as drawn, by argument."""

    run: Callable[..., Any]
    arguments: tuple[CacheState, RaggedBatch, dict[str, Any]]
    arrays: dict[str, Any]


def draw_step(operation: StepOperation, step: DeclaredStep, seed: int) -> DrawnStep:
    """Draw tokens, and pages already full of other tokens. The lse is requested too."""
    arrays = step.draw(seed)
    mesh, kv_heads = operation.metadata.mesh, operation.metadata.policy.kv_heads
    devices = mesh if isinstance(mesh, Mesh) else None
    state = _drawn_state(step.cache, devices, kv_heads, seed)
    batch: Any = step.batch
    placed = arrays
    if devices is not None:
        at = shardings(step.cache, devices, kv_heads=kv_heads)
        batch = jax.device_put(batch, at.batch if isinstance(at.batch, RaggedBatch) else at.batch[batch.group])
        specs = array_specs(operation, plan_declared(operation, step).cache)
        placed = {n: x if x is None else jax.device_put(x, NamedSharding(devices, specs[n])) for n, x in arrays.items()}

    run = step_program(operation, step, step.layer, **({"return_lse": True} if operation.family == "attention" else {}))
    return DrawnStep(run, (state, batch, placed), arrays)


def plan_declared(operation: StepOperation, step: DeclaredStep) -> PagedPlan:
    """The plan of a declared step, with what its batch reads."""
    planned: Any = operation
    plan: PagedPlan = planned.plan(**step.arrays, cache=step.cache, layer=step.layer, batch=step.batch, **step.options)
    return plan


def array_specs(operation: StepOperation, cache: CachePlan) -> dict[str, PartitionSpec]:
    """The spec of each array of a step's call, by argument."""
    return {row.name: step_spec(cache, row.dims) for row in operation.operands}


def step_program(operation: StepOperation, step: DeclaredStep, layer: int, **options: Any) -> Callable[..., Any]:
    """The step as a function of state, batch and arrays by argument; `options` besides the declared ones. It returns the
    operation's own output."""
    called: Any = operation

    def run(state: CacheState, batch: RaggedBatch, arrays: dict[str, Any]) -> Any:
        return called(**arrays, state=state, layer=layer, batch=batch, **step.options | options)

    return run


def _drawn_state(cache: KVCache, mesh: Mesh | None, kv_heads: Any, seed: int) -> CacheState:
    """Pages of normal values, in the stored dtype; scales of about 1/40."""
    random = np.random.default_rng(seed + 1)
    fixed = cache.quantised is not None and cache.quantised.scale != "token_head"
    names = ("key_scale",) if cache.values_in_keys else ("key_scale", "value_scale")
    scales = dict.fromkeys(names, 1 / _AMPLITUDE) if fixed else {}
    state = init(cache, mesh, kv_heads=kv_heads, **scales)

    def fill(array: jax.Array | None) -> jax.Array | None:
        if array is None or array.ndim < 3:
            return array
        drawn: np.ndarray = random.standard_normal(array.shape, np.float32)
        if array.dtype == jnp.int8:
            drawn = np.clip(np.round(_AMPLITUDE * drawn), -127, 127)
        elif array.dtype == jnp.float32 and cache.quantised is not None:
            drawn = (1 + 0.25 * np.abs(drawn)) / _AMPLITUDE
        return jax.device_put(drawn.astype(array.dtype), array.sharding)

    return replace(state, layers=tuple(LayerPages(*map(fill, pages)) for pages in state.layers))  # type: ignore[arg-type]
