"""SmolLM2's engine: its weights, placed as its declared cache is, and its compiled steps."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from smollm_model import Sizes, Weights, fitted, products, step
from step_engine import Sampled, StepEngine

from attnops import InputError, KVCache
from attnops.operators.paged_cache import init, shardings


class Engine(StepEngine):
    """A model of SmolLM2's class over a cache. `attention` is the declared operation, on the mesh of its metadata; `options` are
    those of each of its calls, such as a sliding window.

    Errors: RefusedError for a cache that its plan refuses, InputError for a cache of another model.
    """

    def __init__(
        self,
        sizes: Sizes,
        weights: Weights,
        cache: KVCache,
        attention: Any,
        *,
        budget: int = 64,
        **options: Any,
    ) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            if getattr(cache, name) != getattr(sizes, name):
                raise InputError(
                    f"the cache declares {name}={getattr(cache, name)}, but the model has {getattr(sizes, name)}."
                )
        mesh: Mesh | None = attention.metadata.mesh
        kv_heads = attention.metadata.policy.kv_heads
        plan = cache.plan(mesh, kv_heads=kv_heads).require()
        placed: dict[str, Any] = {}
        axis = None
        if mesh is not None:
            whole, places = NamedSharding(mesh, P()), shardings(cache, mesh, kv_heads=kv_heads)
            axis = places.query.spec[1]
            placed["out_shardings"] = (Sampled(whole, whole), places.state)
        fit = fitted(sizes, weights, plan.kv_repeat, mesh, axis)
        if mesh is not None:
            own = jax.tree.map(lambda x: x.sharding, fit)
            placed["in_shardings"] = (own, places.state, whole, whole, whole, whole)
        run = functools.partial(step, sizes, functools.partial(attention, **options))
        state = init(cache, mesh, kv_heads=kv_heads)
        super().__init__(run, fit, state, plan, budget=budget, **placed)

    def product_seconds(self, tokens: int, repeats: int = 5) -> float:
        """The shortest time of a step's products with the weights alone, for this many tokens."""
        alone, x = jax.jit(products), jnp.ones((self.weights.norm.shape[0], tokens))
        found = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            jax.block_until_ready(alone(self.weights, x))
            found.append(time.perf_counter() - began)
        return min(found[1:])
