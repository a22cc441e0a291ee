"""A step of latent attention over pages: its arrays, projected for the absorbed form, and the note of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import InputError, is_whole
from ...planning.cache.kv_cache import KVCache
from ...planning.notes import note
from ...planning.paged.paged_plan import PagedPlan
from ...registry.latent_dims import LatentDims
from .latent_operands import check_arrays, check_queries
from .latent_query import absorbed
from .work import QueryChoice, choose_query, operations_per_byte, query_note

__all__ = ["check_cache", "noted", "query_of_step", "step_inputs", "step_shapes"]

_LAYOUT = "thd"  # tokens of all sequences


def step_inputs(
    dims: LatentDims, arrays: Mapping[str, Any], choice: QueryChoice | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """(query [tokens, heads, latent_dim + rope_dim], key [tokens, 1, latent_dim + rope_dim]) of a step; None for what it
    lacks. Errors: InputError for a part of the query or key, and for shapes."""
    check_step_arrays(dims, arrays)
    key = None
    if arrays["latent"] is not None:
        key = jnp.concatenate([arrays["latent"], arrays["rope_key"]], -1)[:, None]
    return absorbed(dims, arrays, _LAYOUT, choice is not None and choice.folded), key


def step_shapes(
    dims: LatentDims, arrays: Mapping[str, Any]
) -> tuple[jax.ShapeDtypeStruct | None, jax.ShapeDtypeStruct | None]:
    """The shapes of `step_inputs`."""
    check_step_arrays(dims, arrays)
    _, width, _ = dims.inner("absorbed")
    query, latent = arrays["q_nope" if dims.query_latent_dim is None else "query_latent"], arrays["latent"]
    return (
        None if query is None else jax.ShapeDtypeStruct((query.shape[0], dims.heads, width), query.dtype),
        None if latent is None else jax.ShapeDtypeStruct((latent.shape[0], 1, width), latent.dtype),
    )


def check_cache(dims: LatentDims, cache: Any, layer: Any) -> None:
    """Refuse a cache whose layer doesn't hold these latents. Errors: InputError."""
    known = isinstance(cache, KVCache) and (layer is None or is_whole(layer, 0, cache.layer_count - 1))
    if known and (problem := dims.cache_problem(cache, layer)):  # others are refused by the step
        raise InputError(f"{problem}.")


def query_of_step(dims: LatentDims, plan: PagedPlan) -> QueryChoice | None:
    """How the queries of a planned step are made; None if they are given, or there are none."""
    problem = plan.problem
    if problem.mode == "insert":
        return None
    itemsize = jnp.dtype(problem.runtime_dtype).itemsize
    per_byte = operations_per_byte(problem.platform, problem.device_kind)
    return choose_query(dims, problem.tokens, itemsize, False, per_byte)


def noted(dims: LatentDims, plan: PagedPlan) -> PagedPlan:
    """The plan with what latents save, and how queries are made of theirs."""
    stored = plan.problem.cache.cache
    size = jnp.dtype(stored.stored_dtype).itemsize
    expanded = dims.heads * (dims.head_dim + dims.value_dim) * size
    cached = stored.pages_shape(1, 1, stored.head_dim)[-1] * size
    choice = query_of_step(dims, plan)
    query = () if choice is None else (query_note(choice),)
    return replace(plan, notes=(*plan.notes, *query, note("latent.pages", cached=cached, expanded=expanded)))


def check_step_arrays(dims: LatentDims, arrays: Mapping[str, Any]) -> None:
    """Errors: InputError for a part of what makes the query or the key, and for shapes."""
    check_queries(arrays)
    check_arrays(dims, {name: x for name, x in arrays.items() if x is not None}, _LAYOUT)
