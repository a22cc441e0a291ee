"""CacheState: the pages and states of every layer as a pytree, and how to make it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ...errors import InputError, InputTypeError, ShardingError, a_type, is_whole, shown
from ...planning.cache.cache_plan import CachePlan
from ...planning.cache.kv_cache import KVCache
from ...planning.cache.state_plan import StatePlan
from ...pytree_export import exported
from ...sharding.mesh import AnyMesh
from .batch import RaggedBatch
from .layer_arrays import LayerArrays, LayerPages, LayerStates, planned_layer, row_count

__all__ = [
    "CacheState",
    "abstract",
    "alone",
    "init",
    "layer_of",
]


@exported(
    lambda static: [static[0].to_dict(), static[1]],
    lambda fields: (KVCache.from_dict(fields[0]), fields[1]),
)
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheState:
    """What every layer keeps, and the declaration that it follows. A pytree: donate it to the step that writes it, and only the
    written pages and slots are touched.

    layers: the pages or states of each layer that has its own, in order; a layer with both has its pages first.
    sequence_shards: the number of devices that share each sequence's pages, from the mesh's plan; the arrays hold one such
    device's pages after another's.
    """

    layers: tuple[LayerArrays, ...]
    cache: KVCache = field(metadata={"static": True})
    sequence_shards: int = field(default=1, metadata={"static": True})

    @property
    def pages(self) -> int:
        """Pages of an array, or slots of states, over all shards. Errors: InputError if the layers are in several groups."""
        self.group_number(None)
        return row_count(self.layers[0])

    @property
    def only_pages(self) -> LayerPages:
        """The pages of a state of one layer that has pages."""
        (pages,) = self.layers
        assert isinstance(pages, LayerPages)
        return pages

    def group_number(self, group: int | None) -> int:
        """A group of layers, or the only one. Errors: InputError if it must be specified, and for one that doesn't exist."""
        count = len(self.cache.groups)
        if group is None and count > 1:
            raise InputError(
                f"the cache's layers are in {count} groups, each with its own pages; specify one, such as group=0."
            )
        if group is not None and not is_whole(group, 0, count - 1, numpy=True):
            raise InputError(
                f"group={shown(group)}; wanted 0 to {count - 1}: the cache's layers are in {count} groups."
            )
        return int(group or 0)

    def group(self, group: int) -> CacheState:
        """The state of one group's layers, numbered from 0; itself if there is one group."""
        if len(self.cache.groups) == 1:
            return self
        layers = tuple(self.layers[place] for place in self.cache.places(group))
        shards = 1 if self.cache.groups[group].of_states else self.sequence_shards  # states are whole on each device
        return CacheState(layers, self.cache.part(group, row_count(layers[0])), shards)

    def with_group(self, group: int, group_state: CacheState) -> CacheState:
        """The state with another state for one group's layers."""
        if len(self.cache.groups) == 1:
            return group_state
        layers = list(self.layers)
        for place, pages in zip(self.cache.places(group), group_state.layers, strict=True):
            layers[place] = pages
        return replace(self, layers=tuple(layers))

    def with_layer(self, layer: int, pages: LayerPages) -> CacheState:
        """The state with other pages for one layer, or for the one that it reads."""
        return self._with(self.cache.place_of(layer), pages)

    def states(self, layer: int) -> LayerStates:
        """A layer's states. Errors: InputError for a layer that has none."""
        states = self.layers[self.cache.state_place_of(layer)]
        assert isinstance(states, LayerStates)
        return states

    def with_states(self, layer: int, states: LayerStates) -> CacheState:
        """The state with other states for one layer. Errors: InputError for a layer that has none."""
        return self._with(self.cache.state_place_of(layer), states)

    def _with(self, place: int, arrays: LayerArrays) -> CacheState:
        return replace(self, layers=(*self.layers[:place], arrays, *self.layers[place + 1 :]))


def layer_of(state: CacheState, layer: Any) -> LayerPages:
    """The pages that a layer reads. Errors: InputTypeError if `state` isn't a state or the layer's number isn't known while
    tracing; InputError for a layer out of range."""
    if not isinstance(state, CacheState):
        raise InputTypeError(f"state is {a_type(state)}; wanted a CacheState, such as from init(cache).")
    if not is_whole(layer, numpy=True):
        raise InputTypeError(
            f"layer={shown(layer)} is {a_type(layer)}; wanted an int: each layer has its own arrays, so loop over them in "
            "a Python loop."
        )
    cache = state.cache
    count = cache.layer_count if cache.has_states else len(state.layers) + len(cache.reads_layer or ())
    if not 0 <= layer < count:
        raise InputError(f"layer={layer}; wanted 0 to {count - 1}: the cache has {count} layers.")
    pages = state.layers[cache.place_of(int(layer))]
    assert isinstance(pages, LayerPages)
    return pages


def alone(state: CacheState, layer: int, batch: RaggedBatch) -> CacheState:
    """The state of one layer, in a cache of its group. Errors: those of layer_of; InputError for a batch made for
    another group."""
    pages, cache = layer_of(state, layer), state.cache
    group = cache.group_of(int(layer)) if len(cache.groups) > 1 else None
    if group is not None and batch.group != group:
        raise InputError(
            f"layer {layer} is in group {group} of the cache's layers, but the batch was made for group {batch.group}: page ids "
            f"belong to a group; make one with RaggedBatch.make(plan.groups[{group}], ...)."
        )
    layer_cache = cache if group is None else cache.part(group, row_count(pages))
    return CacheState((pages,), layer_cache, state.sequence_shards)


def init(
    cache: KVCache,
    mesh: Mesh | None = None,
    *,
    kv_heads: Literal["replicate", "error"] = "replicate",
    key_scale: Any = None,
    value_scale: Any = None,
) -> CacheState:
    """Make the cache's arrays, zeros, placed on the mesh, or on jax's default device.

    `key_scale`, `value_scale`: for quantised caches with a scale per tensor or head, which is fixed before anything is written:
    a number, or an array that broadcasts to [layers] or [layers, kv_heads], of the layers that have pages. Errors: RefusedError
    if the plan refuses; InputError for scales that are missing or unused.
    """
    plan = cache.plan(mesh, kv_heads=kv_heads).require()
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ShardingError("init requires a mesh of devices, but got an abstract one; pass one from jax.make_mesh.")
    given = {"key": key_scale, "value": value_scale}
    scales = {f"{name}_scale": _fixed_scales(plan, name, value) for name, value in given.items()}
    numbers = {layer: number for number, layer in enumerate(cache.stored_layers)}

    def made(layer: int, of_group: CachePlan | StatePlan, name: str) -> jax.Array | None:
        array = of_group.get(name)
        if array is None:
            return None
        where = None if mesh is None else NamedSharding(mesh, array.fitted.spec)
        fixed = scales[name][numbers[layer]] if name in scales and layer in numbers else None
        return (
            jnp.zeros(array.fitted.shape, array.dtype, device=where) if fixed is None else jax.device_put(fixed, where)
        )

    entries = [(layer, plan.groups[group]) for layer, group in cache.entries]
    layers = tuple(planned_layer(of_group, partial(made, layer, of_group)) for layer, of_group in entries)
    return CacheState(layers, cache, plan.sequence_shards)


def abstract(plan: CachePlan, mesh: AnyMesh | None = None, *, layers: int | None = None) -> CacheState:
    """The state as shapes, placed as planned, to lower and compile with. `layers`: fewer than all, if given."""

    def of(group_plan: CachePlan | StatePlan, name: str) -> Any:
        array = group_plan.get(name)
        if array is None:
            return None
        where = None if mesh is None else NamedSharding(mesh, array.fitted.spec)
        return jax.ShapeDtypeStruct(array.fitted.shape, array.dtype, sharding=where)

    count = plan.cache.layer_count if layers is None else layers
    entries = [(layer, plan.groups[group]) for layer, group in plan.cache.entries if layer < count]
    arrays = tuple(planned_layer(of_group, partial(of, of_group)) for _, of_group in entries)
    return CacheState(arrays, plan.cache, plan.sequence_shards)  # type: ignore[arg-type]


def _fixed_scales(plan: CachePlan, tensor: str, value: Any) -> list[np.ndarray | None]:
    """For each layer, its scale declared as fixed, float32 [] or [stored heads], else None."""
    quantised, name = plan.cache.quantised, f"{tensor}_scale"
    layers = plan.cache.stored_layers
    parts = [plan.groups[plan.cache.group_of(layer)] for layer in layers]
    has_scale = [tensor == "key" or not part.cache.values_in_keys for part in parts]
    if quantised is None or quantised.scale == "token_head" or not any(has_scale):
        if value is not None:
            why = "the cache isn't quantised" if quantised is None else "scales are per token and head"
            why = why if any(has_scale) else "values are in the keys, and have their scale"
            raise InputError(f"{name} is given, but {why}; leave it out.")
        return [None for _ in layers]
    if value is None:
        raise InputError(
            f"{name} is missing: the cache's scale is per {quantised.scale} and fixed before anything is written; pass a "
            "number, the largest value to be stored over the largest of the dtype."
        )
    heads = {part.cache.kv_heads for part in parts}
    shape: tuple[int, ...] = (len(layers),)
    if quantised.scale != "tensor" and len(heads) == 1:
        shape = (*shape, *heads)
    try:
        scale = np.broadcast_to(np.asarray(value, np.float32), shape)
    except (TypeError, ValueError):
        raise InputError(f"{name}={shown(value)}; wanted a number, or an array that broadcasts to {shape}.") from None
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise InputError(f"{name}={shown(value)}; wanted finite numbers above 0.")
    if quantised.scale == "tensor":
        return [row if has else None for row, has in zip(scale, has_scale, strict=True)]
    return [
        np.repeat(np.broadcast_to(row, part.cache.kv_heads), part.kv_repeat) if has else None
        for row, part, has in zip(scale, parts, has_scale, strict=True)
    ]
