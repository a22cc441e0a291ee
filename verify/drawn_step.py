"""A declared step with random arrays, ready to run on this machine's devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..operators.paged import PagedOperation
from ..operators.paged.declared_step import DeclaredStep
from ..operators.paged.step_output import StepOutput
from ..operators.paged_cache import CacheState, LayerPages, RaggedBatch, init, shardings
from ..planning.cache.kv_cache import KVCache

__all__ = ["DrawnStep", "draw_step", "step_program"]

_AMPLITUDE = 40  # largest value drawn for int8 pages


class DrawnStep(NamedTuple):
    """`run(state, batch, tokens, sinks)` is the step of the declared layer; `arguments` are its arguments, placed; `arrays` the
    arrays as drawn."""

    run: Callable[..., StepOutput]
    arguments: tuple[CacheState, RaggedBatch, tuple[Any, Any, Any], Any]
    arrays: dict[str, Any]


def draw_step(operation: PagedOperation, step: DeclaredStep, seed: int) -> DrawnStep:
    """Draw tokens, and pages already full of other tokens. The lse is requested too."""
    arrays = step.draw(seed)
    mesh, kv_heads = operation.metadata.mesh, operation.metadata.policy.kv_heads
    devices = mesh if isinstance(mesh, Mesh) else None
    state = _drawn_state(step.cache, devices, kv_heads, seed)
    batch: Any = step.batch
    tokens = arrays["query"], arrays["key"], arrays["value"]
    if devices is not None:
        at = shardings(step.cache, devices, kv_heads=kv_heads)
        batch = jax.device_put(batch, at.batch if isinstance(at.batch, RaggedBatch) else at.batch[batch.group])
        tokens = jax.device_put(tokens, (at.query, *(None if x is None else at.key for x in tokens[1:])))

    run = step_program(operation, step, step.layer, return_lse=True)
    return DrawnStep(run, (state, batch, tokens, arrays["sinks"]), arrays)


def step_program(
    operation: PagedOperation, step: DeclaredStep, layer: int, **options: Any
) -> Callable[..., StepOutput]:
    """The step as a function of state, batch, (query, key, value) and sinks; `more` are options besides the declared ones."""

    def run(state: CacheState, batch: RaggedBatch, tokens: tuple[Any, Any, Any], sinks: Any) -> StepOutput:
        call = step.options | {"softmax_aux": sinks} | options
        return operation(*tokens, state=state, layer=layer, batch=batch, **call)

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
