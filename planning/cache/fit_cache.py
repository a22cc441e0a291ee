"""Fit a declared KV cache to a mesh and a kind of device: a pure function that returns a CachePlan."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ...devices import SCALAR_BYTES, tpu_of
from ...errors import ConfigError, shown
from ...names import checked_name
from ...page_layouts import LAYOUTS
from ...sharding import FittedSpec, MeshAxis, TensorShape, axes_of, devices_platform, fit_tensor, kv_repeat
from ...sharding.mesh import AnyMesh, devices_cores, gpu_vendor
from .cache_checks import axis_names
from .cache_fields import CacheFields
from .cache_numbers import CacheArray
from .cache_plan import CachePlan
from .reasons_against import CacheSizes, memory_refusal, notes, padded, refusals, without_duplicates
from .window_pages import pages_of_all

__all__ = ["fit_cache"]

_config: Any = jax.config
_PLATFORMS = ("cpu", "cuda", "rocm", "gpu", "tpu")


class _Target(NamedTuple):
    """What a cache is planned for. Bytes of scalar memory and of memory are None if unknown."""

    platform: str
    kind: str
    scalars: int | None
    memory: int | None


def fit_cache(cache: CacheFields, mesh: AnyMesh | None, kv_heads: str, device_kind: str | None) -> CachePlan:
    """See KVCache.plan."""
    if kv_heads not in ("replicate", "error"):
        raise ConfigError(f"kv_heads={shown(kv_heads)}; wanted 'replicate' or 'error'.")
    return _fitted(cache, axes_of(mesh), _target(mesh, device_kind), kv_heads)


@functools.lru_cache(maxsize=256)  # every layer's step asks
def _fitted(cache: CacheFields, axes: tuple[MeshAxis, ...], target: _Target, kv_heads: str) -> CachePlan:
    shards, head_shards = _split(cache.pages_axis, axes), _split(cache.kv_head_axis, axes)
    along = _split(cache.page_sequence_axis, axes)
    sizes = CacheSizes(0, shards, along, kv_repeat(cache.kv_heads, head_shards), head_shards)
    counts = _pages(cache, sizes, axes, target)
    if len(counts) == 1:
        return _fit_one(cache, sizes._replace(pages=counts[0]), axes, target, kv_heads)
    many = len(counts)
    alone = target._replace(memory=None)  # all groups share the memory
    parts = [
        _fit_one(part, _of_part(sizes, part)._replace(pages=pages), axes, alone, kv_heads, (n, many))
        for n, pages in enumerate(counts)
        for part in (cache.part(n, pages),)
    ]
    arrays = [array._replace(group=n) for n, part in enumerate(parts) for array in part.arrays]
    whole = replace(
        parts[0],
        cache=cache,
        pages=sum(counts),
        arrays=tuple(arrays),
        memory_limit=target.memory,
        refused=(),
        notes=without_duplicates([part.notes for part in parts]),
        group=None,
    )
    refused = without_duplicates([part.refused for part in parts]) + memory_refusal(whole)
    parts = [replace(part, refused=refused) for part in parts]
    return replace(whole, refused=refused, parts=tuple(parts))


def _of_part(sizes: CacheSizes, part: CacheFields) -> CacheSizes:
    """The sizes of one group's layers, which may have kv heads of their own."""
    return sizes._replace(repeat=kv_repeat(part.kv_heads, sizes.head_shards))


def _fit_one(
    cache: CacheFields,
    sizes: CacheSizes,
    axes: tuple[MeshAxis, ...],
    target: _Target,
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


def _pages(cache: CacheFields, sizes: CacheSizes, axes: tuple[MeshAxis, ...], target: _Target) -> tuple[int, ...]:
    """Pages of each group: as declared, or as many as fit in the bytes per device next to everything else.

    All groups get the same number, but a group with a window gets no more than all sequences can use; the others get the rest.
    """
    if cache.bytes_per_device is None:
        return tuple(group.pages or cache.pages or 0 for group in cache.groups)
    step = sizes.shards * sizes.along
    parts = [cache.part(n, 1) for n in range(len(cache.groups))]
    left, prices, limits = cache.bytes_per_device, [], []
    for part in parts:
        own_sizes = _of_part(sizes, part)
        empty, one_step = (_arrays(part, own_sizes._replace(pages=pages), axes, target) for pages in (0, step))
        fixed, with_one = (sum(array.copies * array.device_bytes for array in arrays) for arrays in (empty, one_step))
        left -= fixed
        prices.append(with_one - fixed)
        limits.append(
            None if part.window_tokens is None else pages_of_all(part, sizes.shards, sizes.along) // sizes.along
        )
    if None not in limits:
        limits = [None] * len(limits)  # no other group could use the rest
    counts = [0] * len(parts)
    order = sorted(range(len(parts)), key=lambda n: math.inf if (limit := limits[n]) is None else limit)
    for place, n in enumerate(order):
        share = max(0, left // sum(prices[other] for other in order[place:]))
        limit = limits[n]
        counts[n] = share if limit is None else min(share, limit)
        left -= counts[n] * prices[n]
    return tuple(count * step for count in counts)


def _arrays(
    cache: CacheFields, sizes: CacheSizes, axes: tuple[MeshAxis, ...], target: _Target
) -> tuple[CacheArray, ...]:
    heads, batches, tp = cache.kv_heads * sizes.repeat, cache.pages_axis, cache.kv_head_axis
    along = axis_names(cache.page_sequence_axis)
    pages = (*axis_names(batches), *along) if along else batches
    arrays = []

    def add(name: str, spec: PartitionSpec, shape: tuple[int, ...], dims: str, dtype: str, count: int = 1) -> None:
        size = jnp.dtype(dtype).itemsize
        fitted = fit_tensor(name, spec, TensorShape(shape, size), tuple(dims.split()), axes)
        arrays.append(CacheArray(fitted, dtype, count, _device_bytes(fitted, size, target)))

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


def _device_bytes(fitted: FittedSpec, itemsize: int, target: _Target) -> int:
    if target.platform != "tpu" or len(fitted.shape) < 4:
        return fitted.local_bytes
    *rest, lanes = fitted.local_shape
    return math.prod(rest) * padded(lanes) * itemsize


def _split(declared: Any, axes: tuple[MeshAxis, ...]) -> int:
    """The number of parts into which the declared mesh axes split. Manual axes are the caller's and don't count."""
    return math.prod(axis.size for axis in axes if axis.name in axis_names(declared) and axis.kind != "manual")


def _target(mesh: AnyMesh | None, device_kind: str | None) -> _Target:
    """The target: the given kind, else the mesh's devices, else jax's default device."""
    real: Any = None
    if device_kind is not None:
        if not isinstance(device_kind, str) or not device_kind.strip():
            raise ConfigError(
                f"device_kind={shown(device_kind)}; wanted jax's name for a device, such as 'TPU v5 lite'."
            )
        checked_name(device_kind, "device_kind")
        first = device_kind.split()[0].lower()
        platform = "tpu" if first.startswith("tpu") else first if first in _PLATFORMS else "gpu"
        kind = "" if device_kind in _PLATFORMS else device_kind
    elif (mesh_platform := devices_platform(mesh)) is not None:
        platform, kind = mesh_platform
        real = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    else:  # also for a mesh without devices, as for calls
        real = _default_device()
        platform, kind = gpu_vendor(real.platform, real.client), real.device_kind
    if platform == "tpu":
        # Of a mesh of such devices, jax says how many cores they have.
        same = (devices_platform(mesh) or ("", ""))[1] == kind
        device = tpu_of(kind, devices_cores(mesh) if same else getattr(real, "num_cores", None))
        if device is None:
            return _Target(platform, kind, SCALAR_BYTES, _memory(real))
        return _Target(platform, kind, device.scalar_bytes, _memory(real) or device.hbm_bytes)
    return _Target(platform, kind, None, _memory(real))


def _default_device() -> Any:
    chosen = _config.jax_default_device
    return chosen if chosen is not None and not isinstance(chosen, str) else jax.devices(chosen)[0]


def _memory(device: Any) -> int | None:
    """Bytes that a device's allocator may use; None if unknown, as for a CPU or a device that isn't here."""
    if getattr(device, "client", None) is None:
        return None
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # a described device, or another process's
        return None
    return None if not stats else stats.get("bytes_limit")
