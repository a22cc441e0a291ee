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
from .forms import absorbed_query
from .latent_operands import check_arrays

__all__ = ["check_cache", "noted", "step_inputs", "step_shapes"]

_LAYOUT = "thd"  # tokens of all sequences


def step_inputs(dims: LatentDims, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """(query [tokens, heads, latent_dim + rope_dim], key [tokens, 1, latent_dim + rope_dim]) of a step; None for what it
    lacks. Errors: InputError for half of a pair, and for shapes."""
    _check(dims, arrays)
    query = key = None
    if arrays["q_nope"] is not None:
        query = absorbed_query(arrays["q_nope"], arrays["q_rope"], arrays["w_uk"], layout=_LAYOUT)
    if arrays["latent"] is not None:
        key = jnp.concatenate([arrays["latent"], arrays["rope_key"]], -1)[:, None]
    return query, key


def step_shapes(dims: LatentDims, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """The shapes of `step_inputs`."""
    _check(dims, arrays)
    _, width, _ = dims.inner("absorbed")
    query, latent = arrays["q_nope"], arrays["latent"]
    return (
        None if query is None else jax.ShapeDtypeStruct((query.shape[0], dims.heads, width), query.dtype),
        None if latent is None else jax.ShapeDtypeStruct((latent.shape[0], 1, width), latent.dtype),
    )


def check_cache(dims: LatentDims, cache: Any, layer: Any) -> None:
    """Refuse a cache whose layer doesn't hold these latents. Errors: InputError."""
    known = isinstance(cache, KVCache) and (layer is None or is_whole(layer, 0, cache.layer_count - 1))
    if known and (problem := dims.cache_problem(cache, layer)):  # others are refused by the step
        raise InputError(f"{problem}.")


def noted(dims: LatentDims, plan: PagedPlan) -> PagedPlan:
    """The plan with what latents save."""
    stored = plan.problem.cache.cache
    size = jnp.dtype(stored.stored_dtype).itemsize
    expanded = dims.heads * (dims.head_dim + dims.value_dim) * size
    cached = stored.pages_shape(1, 1, stored.head_dim)[-1] * size
    return replace(plan, notes=(*plan.notes, note("latent.pages", cached=cached, expanded=expanded)))


def _check(dims: LatentDims, arrays: Mapping[str, Any]) -> None:
    for pair in (("q_nope", "q_rope"), ("latent", "rope_key")):
        present = [name for name in pair if arrays[name] is not None]
        if len(present) == 1:
            raise InputError(
                f"{present[0]} is given without {next(name for name in pair if name not in present)}; wanted both, or neither."
            )
    check_arrays(dims, {name: x for name, x in arrays.items() if x is not None}, _LAYOUT)
