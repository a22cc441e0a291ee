"""CacheState: the pages of every layer as a pytree; how to make it, and where it and its batches are placed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Num

from ...errors import InputError, InputTypeError, ShardingError, a_type, is_whole, shown
from ...planning.cache.cache_plan import CachePlan
from ...planning.cache.kv_cache import KVCache
from ...planning.paged.step_operands import token_specs
from ...pytree_export import exported, exported_tuple
from ...sharding.mesh import AnyMesh
from .batch import RaggedBatch

__all__ = [
    "CacheShardings",
    "CacheState",
    "LayerPages",
    "abstract",
    "alone",
    "init",
    "layer_of",
    "shardings",
    "step_specs",
]


@exported_tuple
class LayerPages(NamedTuple):
    """One layer's pages, in the cache's layout; the shapes here are those of layout split. If a layout joins keys and
    values, `key` has both and `value` is None. Scales are None, [] (per tensor), [kv_heads], or [pages, page, kv_heads].
    rope: the rotary keys beside quantised latents, which aren't quantised; `key` has the latents alone then.
    """

    key: Num[Array, "pages page kv_heads head_dim"]
    value: Num[Array, "pages page kv_heads value_dim"] | None
    key_scale: Float[Array, ...] | None = None
    value_scale: Float[Array, ...] | None = None
    rope: Float[Array, "pages kv_heads page rope_dim"] | None = None


@exported(
    lambda static: [static[0].to_dict(), static[1]],
    lambda fields: (KVCache.from_dict(fields[0]), fields[1]),
)
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheState:
    """Every layer's pages, one array per layer that has its own, and the declaration that they follow. A pytree: donate it to
    the step that writes it, and only the written pages are touched.

    sequence_shards: the number of devices that share each sequence's pages, from the mesh's plan; the arrays hold one such
    device's pages after another's.
    """

    layers: tuple[LayerPages, ...]
    cache: KVCache = field(metadata={"static": True})
    sequence_shards: int = field(default=1, metadata={"static": True})

    @property
    def pages(self) -> int:
        """Pages of an array, over all shards. Errors: InputError if the layers are in several groups."""
        self.group_number(None)
        return self.layers[0].key.shape[0]

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
        return CacheState(layers, self.cache.part(group, layers[0].key.shape[0]), self.sequence_shards)

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
        place = self.cache.place_of(layer)
        return replace(self, layers=(*self.layers[:place], pages, *self.layers[place + 1 :]))


class CacheShardings(NamedTuple):
    """NamedShardings of a cache's arrays: `state` and `batch` have the structure of what they place. `query`, `key` and
    `value` are for tokens [tokens, heads, dim]. If layers are in several groups, `batch` is a tuple with one for each."""

    state: CacheState
    batch: Any
    query: NamedSharding
    key: NamedSharding
    value: NamedSharding


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
    count = len(state.layers) + len(state.cache.reads_layer or ())
    if not 0 <= layer < count:
        raise InputError(f"layer={layer}; wanted 0 to {count - 1}: the cache has {count} layers.")
    return state.layers[state.cache.place_of(int(layer))]


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
    layer_cache = cache if group is None else cache.part(group, pages.key.shape[0])
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
    given = (("key", key_scale), ("value", value_scale))
    scales = {name: _fixed_scales(plan, name, scale_value) for name, scale_value in given}

    def place(group_plan: CachePlan, name: str) -> Any:
        return None if mesh is None else NamedSharding(mesh, group_plan[name].fitted.spec)

    def zeros(group_plan: CachePlan, name: str) -> jax.Array | None:
        array = group_plan.get(name)
        return None if array is None else jnp.zeros(array.fitted.shape, array.dtype, device=place(group_plan, name))

    def scale(group_plan: CachePlan, tensor: str, layer: int) -> jax.Array | None:
        fixed, name = scales[tensor][layer], f"{tensor}_scale"
        return zeros(group_plan, name) if fixed is None else jax.device_put(fixed, place(group_plan, name))

    layers = []
    for number, layer in enumerate(cache.stored_layers):
        of_group = plan.groups[cache.group_of(layer)]
        key = zeros(of_group, of_group.pages_array.name)
        assert key is not None
        layers.append(
            LayerPages(
                key,
                zeros(of_group, "value_pages"),
                scale(of_group, "key", number),
                scale(of_group, "value", number),
                zeros(of_group, "rope_pages"),
            )
        )
    return CacheState(tuple(layers), cache, plan.sequence_shards)


def abstract(plan: CachePlan, mesh: AnyMesh | None = None, *, layers: int | None = None) -> CacheState:
    """The state as shapes, placed as planned, to lower and compile with. `layers`: fewer than all, if given."""

    def of(group_plan: CachePlan, name: str) -> Any:
        array = group_plan.get(name)
        if array is None:
            return None
        where = None if mesh is None else NamedSharding(mesh, array.fitted.spec)
        return jax.ShapeDtypeStruct(array.fitted.shape, array.dtype, sharding=where)

    count = plan.cache.layer_count if layers is None else layers
    stored = (layer for layer in plan.cache.stored_layers if layer < count)
    plans = [plan.groups[plan.cache.group_of(layer)] for layer in stored]
    pages = tuple(LayerPages(*(of(group_plan, name) for name in _names(group_plan))) for group_plan in plans)
    return CacheState(pages, plan.cache, plan.sequence_shards)  # type: ignore[arg-type]


def shardings(cache: KVCache, mesh: Mesh, *, kv_heads: Literal["replicate", "error"] = "replicate") -> CacheShardings:
    """The placement of all arrays of a cache on a mesh, in the form that jax.device_put and jit's in_shardings take.

    Heads of `query` are split like those of the pages; those of `key` and `value`, which have the declared heads, only if they
    needn't be repeated. Errors: RefusedError if the plan refuses.
    """
    plan = cache.plan(mesh, kv_heads=kv_heads).require()
    groups = [
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), step_specs(part), is_leaf=_is_spec) for part in plan.groups
    ]
    key = NamedSharding(mesh, token_specs(plan)[1])
    layers = tuple(groups[cache.group_of(layer)][1] for layer in cache.stored_layers)
    state = CacheState(layers, cache, plan.sequence_shards)
    batches = tuple(batch for _, _, batch in groups)
    return CacheShardings(state, batches if len(batches) > 1 else batches[0], groups[0][0], key, key)


def step_specs(plan: CachePlan) -> tuple[PartitionSpec, LayerPages, RaggedBatch]:
    """Specs of a query [tokens, heads, dim], of a layer's pages and of a batch, in the structure of what they place; the plan is
    that of one group of layers."""

    def of(name: str) -> Any:
        array = plan.get(name)
        return None if array is None else array.fitted.spec

    layer = LayerPages(*map(of, _names(plan)))
    group = 0 if plan.group is None else plan.group[0]
    batch = RaggedBatch(of("cu_q_lens"), of("kv_lens"), of("page_table"), of("num_seqs"), group)
    return token_specs(plan)[0], layer, batch


def _names(plan: CachePlan) -> tuple[str, ...]:
    """The names of a layer's arrays, in the order of LayerPages."""
    return plan.pages_array.name, "value_pages", "key_scale", "value_scale", "rope_pages"


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


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
