"""Fit a declared KV cache to a mesh and a kind of device: a pure function that returns a CachePlan."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...errors import ConfigError, shown
from ...page_layouts import LAYOUTS
from ...sharding import MeshAxis, TensorShape, axes_of, fit_tensor, kv_repeat
from ...sharding.mesh import AnyMesh
from .cache_arrays import CacheArray, CacheArrays
from .cache_checks import axis_names
from .cache_fields import CacheFields
from .cache_plan import CachePlan
from .cache_target import CacheTarget, cache_target, device_bytes, ways
from .fit_states import fit_states
from .reasons_against import CacheSizes, bytes_refusal, memory_refusal, notes, refusals, without_duplicates
from .window_pages import pages_of_all

__all__ = ["fit_cache"]


def fit_cache(cache: CacheFields, mesh: AnyMesh | None, kv_heads: str, device_kind: str | None) -> CachePlan:
    """See KVCache.plan."""
    if kv_heads not in ("replicate", "error"):
        raise ConfigError(f"kv_heads={shown(kv_heads)}; wanted 'replicate' or 'error'.")
    return _fitted(cache, axes_of(mesh), cache_target(mesh, device_kind), kv_heads)


@functools.lru_cache(maxsize=256)  # every layer's step asks
def _fitted(cache: CacheFields, axes: tuple[MeshAxis, ...], target: CacheTarget, kv_heads: str) -> CachePlan:
    shards, head_shards = ways(cache.pages_axis, axes), ways(cache.kv_head_axis, axes)
    along = ways(cache.page_sequence_axis, axes)
    sizes = CacheSizes(0, shards, along, kv_repeat(max(1, cache.kv_heads), head_shards), head_shards)
    many = len(cache.groups)
    states = {
        n: fit_states(cache.part(n, 1), shards, axes, target, (n, many))
        for n, group in enumerate(cache.groups)
        if group.of_states
    }
    counts = _pages(cache, sizes, axes, target, sum(plan.bytes_per_device for plan in states.values()))
    if many == 1 and not states:
        return _fit_one(cache, sizes._replace(pages=counts[0]), axes, target, kv_heads)
    alone = target._replace(memory=None)  # all groups share the memory
    parts: list[CacheArrays] = [
        _fit_one(part, _of_part(sizes, part)._replace(pages=counts[n]), axes, alone, kv_heads, (n, many))
        if (found := states.get(n)) is None
        else found
        for n in range(many)
        for part in (cache.part(n, counts.get(n, 0)),)
    ]
    arrays = [array._replace(group=n if many > 1 else None) for n, part in enumerate(parts) for array in part.arrays]
    whole = CachePlan(
        cache=cache,
        mesh=axes,
        platform=target.platform,
        device_kind=target.kind,
        pages=sum(counts.values()),
        shards=shards,
        sequence_shards=along if len(states) < many else 1,
        kv_repeat=sizes.repeat,
        arrays=tuple(arrays),
        scalar_limit=target.scalars,
        memory_limit=target.memory,
        notes=without_duplicates([part.notes for part in parts]),
        parts=tuple(parts),
    )
    refused = without_duplicates([part.refused for part in parts]) + memory_refusal(whole) + bytes_refusal(whole)
    return replace(whole, refused=refused, parts=tuple(replace(part, refused=refused) for part in parts))


def _of_part(sizes: CacheSizes, part: CacheFields) -> CacheSizes:
    """The sizes of one group's layers, which may have kv heads of their own."""
    return sizes._replace(repeat=kv_repeat(part.kv_heads, sizes.head_shards))


def _fit_one(
    cache: CacheFields,
    sizes: CacheSizes,
    axes: tuple[MeshAxis, ...],
    target: CacheTarget,
    policy: str,
    group: tuple[int, int] | None = None,
) -> CachePlan:
    """The plan of one group of layers."""
    plan = CachePlan(
        cache=cache,
        mesh=axes,
        platform=target.platform,
        device_kind=target.kind,
        pages=sizes.pages,
        shards=sizes.shards,
        sequence_shards=sizes.along,
        kv_repeat=sizes.repeat,
        arrays=_arrays(cache, sizes, axes, target),
        scalar_limit=target.scalars,
        memory_limit=target.memory,
        refused=(),
        notes=(),
        group=group,
    )
    return replace(plan, refused=tuple(refusals(plan, sizes, policy)), notes=tuple(notes(plan, sizes)))


def _pages(
    cache: CacheFields, sizes: CacheSizes, axes: tuple[MeshAxis, ...], target: CacheTarget, of_states: int
) -> dict[int, int]:
    """Pages of each group that has any: as declared, or as many as fit in the bytes per device next to everything else, states
    included (`of_states` bytes).

    All groups get the same number, but a group with a window gets no more than all sequences can use; the others get the rest.
    """
    with_pages = {n: group for n, group in enumerate(cache.groups) if not group.of_states}
    if cache.bytes_per_device is None or not with_pages:
        return {n: group.pages or cache.pages or 0 for n, group in with_pages.items()}
    step = sizes.shards * sizes.along
    left, prices, limits = cache.bytes_per_device - of_states, {}, {}
    for n in with_pages:
        part = cache.part(n, 1)
        own_sizes = _of_part(sizes, part)
        empty, one_step = (_arrays(part, own_sizes._replace(pages=pages), axes, target) for pages in (0, step))
        fixed, with_one = (sum(array.copies * array.device_bytes for array in arrays) for arrays in (empty, one_step))
        left -= fixed
        prices[n] = with_one - fixed
        window = part.window_tokens is not None
        limits[n] = pages_of_all(part, sizes.shards, sizes.along) // sizes.along if window else math.inf
    if math.inf not in limits.values():
        limits = dict.fromkeys(limits, math.inf)  # no other group could use the rest
    counts = {}
    order = sorted(with_pages, key=lambda n: limits[n])
    for place, n in enumerate(order):
        share = max(0, left // sum(prices[other] for other in order[place:]))
        counts[n] = int(min(share, limits[n]))
        left -= counts[n] * prices[n]
    return {n: counts[n] * step for n in with_pages}


def _arrays(
    cache: CacheFields, sizes: CacheSizes, axes: tuple[MeshAxis, ...], target: CacheTarget
) -> tuple[CacheArray, ...]:
    heads, batches, tp = cache.kv_heads * sizes.repeat, cache.pages_axis, cache.kv_head_axis
    along = axis_names(cache.page_sequence_axis)
    pages = (*axis_names(batches), *along) if along else batches
    arrays = []

    def add(name: str, spec: PartitionSpec, shape: tuple[int, ...], dims: str, dtype: str, count: int = 1) -> None:
        size = jnp.dtype(dtype).itemsize
        fitted = fit_tensor(name, spec, TensorShape(shape, size), tuple(dims.split()), axes)
        arrays.append(CacheArray(fitted, dtype, count, device_bytes(fitted, size, target)))

    shape: tuple[int, ...]
    for name, (dim, dtype) in _page_arrays(cache).items():
        shape = cache.pages_shape(sizes.pages, heads, dim)
        spec = _with_heads(cache, pages, tp, len(shape))
        add(name, spec, shape, " ".join(LAYOUTS[cache.layout].dims), dtype, len(cache.stored_layers))
    scaled = ("key_scale",) if cache.values_in_keys else ("key_scale", "value_scale")
    for name in scaled if cache.quantised is not None else ():
        match cache.quantised.scale if cache.quantised is not None else "":
            case "tensor":
                add(name, PartitionSpec(), (), "", "float32", len(cache.stored_layers))
            case "head":
                add(name, PartitionSpec(tp), (heads,), "kv_heads", "float32", len(cache.stored_layers))
            case _:
                shape = (sizes.pages, cache.page_size, heads)
                dims = "pages page kv_heads"
                if cache.heads_at == 1:
                    shape, dims = (sizes.pages, heads, cache.page_size), "pages kv_heads page"
                add(name, _with_heads(cache, pages, tp, 3), shape, dims, "float32", len(cache.stored_layers))
    rows, width = cache.max_sequences // sizes.shards, -(-cache.table_width // sizes.along)
    lead = () if batches is None else (batches,)
    table = () if sizes.along == 1 else (sizes.along,)
    of_batch: dict[str, tuple[int, ...]] = {
        "page_table": (*table, rows, width),
        "cu_q_lens": (rows + 1,),
        "kv_lens": (rows,),
        "num_seqs": (),
    }
    for name, shape in of_batch.items():
        split = (*lead, *(along for _ in table if name == "page_table"))
        dim_names = (*("shards" for _ in lead), *("sequence_shards" for _ in split[len(lead) :]), "sequences", "pages")
        shape = (*(sizes.shards for _ in lead), *shape)
        add(
            name,
            PartitionSpec(*split, *(None for _ in shape[len(split) :])),
            shape,
            " ".join(dim_names[: len(shape)]),
            "int32",
        )
    return tuple(arrays)


def _page_arrays(cache: CacheFields) -> dict[str, tuple[int, str]]:
    """The arrays of pages, and the head dimension and dtype of each."""
    stored = cache.stored_dtype
    if LAYOUTS[cache.layout].one_array:
        rope = (
            {}
            if cache.rope_dtype is None or not cache.rope_size
            else {"rope_pages": (cache.rope_size, cache.rope_dtype)}
        )
        return {"kv_pages": (cache.key_size, stored), **rope}
    return {"key_pages": (cache.head_dim, stored), "value_pages": (cache.value_size, stored)}


def _with_heads(cache: CacheFields, pages: Any, heads: Any, rank: int) -> PartitionSpec:
    """The spec of an array that is split by pages and heads."""
    at = {0: pages, cache.heads_at: heads}
    return PartitionSpec(*(at.get(index) for index in range(rank)))
