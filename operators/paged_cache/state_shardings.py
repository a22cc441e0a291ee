"""CacheShardings: where a cache's arrays and its batches are placed on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...planning.cache.cache_plan import CachePlan
from ...planning.cache.kv_cache import KVCache
from ...planning.cache.state_plan import StatePlan
from ...planning.paged.step_operands import token_specs
from .batch import RaggedBatch
from .layer_arrays import LayerArrays, LayerPages, planned_layer
from .state import CacheState
from .state_batch import StateBatch

__all__ = ["CacheShardings", "group_specs", "shardings", "step_specs"]


class CacheShardings(NamedTuple):
    """NamedShardings of a cache's arrays: `state` and `batch` have the structure of what they place. `query`, `key` and
    `value` are for tokens [tokens, heads, dim]; None if no layer has pages. If layers are in several groups, `batch` is a tuple
    with one for each."""

    state: CacheState
    batch: Any
    query: NamedSharding | None
    key: NamedSharding | None
    value: NamedSharding | None


def shardings(cache: KVCache, mesh: Mesh, *, kv_heads: Literal["replicate", "error"] = "replicate") -> CacheShardings:
    """The placement of all arrays of a cache on a mesh, in the form that jax.device_put and jit's in_shardings take.

    Heads of `query` are split like those of the pages; those of `key` and `value`, which have the declared heads, only if they
    needn't be repeated. Errors: RefusedError if the plan refuses.
    """
    plan = cache.plan(mesh, kv_heads=kv_heads).require()
    groups = [
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), group_specs(part), is_leaf=_is_spec)
        for part in plan.groups
    ]
    layers = tuple(groups[group][0] for _, group in cache.entries)
    state = CacheState(layers, cache, plan.sequence_shards)
    batches = tuple(batch for _, batch in groups)
    query = key = None
    if plan.page_groups:
        query, key = (NamedSharding(mesh, spec) for spec in token_specs(plan.page_groups[0]))
    return CacheShardings(state, batches if len(batches) > 1 else batches[0], query, key, key)


def step_specs(plan: CachePlan) -> tuple[PartitionSpec, LayerPages, RaggedBatch]:
    """Specs of a query [tokens, heads, dim], of a layer's pages and of a batch, in the structure of what they place; the plan is
    that of one group of layers."""
    layer, batch = group_specs(plan)
    assert isinstance(layer, LayerPages)
    return token_specs(plan)[0], layer, batch


def group_specs(plan: CachePlan | StatePlan) -> tuple[LayerArrays, Any]:
    """Specs of the arrays of a layer of one group, and of a batch for it, in the structure of what they place."""

    def of(name: str) -> Any:
        array = plan.get(name)
        return None if array is None else array.fitted.spec

    return planned_layer(plan, of), _BATCHES[plan.keeps](plan, of)


def _of_pages(plan: CachePlan | StatePlan, of: Callable[[str], Any]) -> Any:
    group = 0 if plan.group is None else plan.group[0]
    return RaggedBatch(of("cu_q_lens"), of("kv_lens"), of("page_table"), of("num_seqs"), group)


def _of_states(plan: CachePlan | StatePlan, of: Callable[[str], Any]) -> Any:
    return StateBatch(*map(of, ("cu_q_lens", "kv_lens", "num_seqs", "read_slots", "write_slots")))


_BATCHES = {"pages": _of_pages, "states": _of_states}


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)
