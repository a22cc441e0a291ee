"""Meshes: find the current one, get its axes and platform, and serialise it as names and sizes."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh, get_mesh

from ..compat import abstract_device, platform_of
from ..errors import ConfigError, ShardingError, is_whole, nearest, shown
from ..names import checked_name

__all__ = [
    "AnyMesh",
    "MeshAxis",
    "axes_of",
    "current_mesh",
    "describe_mesh",
    "devices_cores",
    "devices_platform",
    "mesh_from_dict",
    "mesh_to_dict",
    "parse_mesh",
    "unused_axes",
    "virtual_mesh",
]

AnyMesh = Mesh | AbstractMesh
_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}
_PLATFORMS = ("tpu", "gpu", "cuda", "rocm", "cpu")


class MeshAxis(NamedTuple):
    """One axis of a mesh: its name, its size and 'auto', 'explicit' or 'manual'."""

    name: str
    size: int
    kind: str = "auto"

    @property
    def splits(self) -> bool:
        """Whether attnops can split something over it: it is longer than 1, and not Manual, which is the caller's."""
        return self.size > 1 and self.kind != "manual"

    @property
    def label(self) -> str:
        """`tp=2`."""
        return f"{self.name}={self.size}"


def unused_axes(mesh: Iterable[MeshAxis], used: Collection[str]) -> tuple[MeshAxis, ...]:
    """The axes along which all devices do the same, if these are the axes that split something."""
    return tuple(axis for axis in mesh if axis.splits and axis.name not in used)


def axes_of(mesh: AnyMesh | Mapping[str, int] | tuple[MeshAxis, ...] | None) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh or of a {name: size} mapping; () for None. Needs no devices.

    Errors: ShardingError for a name that isn't printable.
    """
    if mesh is None:
        return ()
    if isinstance(mesh, tuple):
        return mesh
    if isinstance(mesh, Mapping):
        _check_sizes(mesh)
        return tuple(MeshAxis(_axis(name), size) for name, size in mesh.items())
    return tuple(
        MeshAxis(_axis(name), size, _TYPE_NAMES[kind])
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def _axis(name: object) -> str:
    return checked_name(str(name), "mesh axis", ShardingError)


@functools.cache
def _thread_resources() -> Any | None:
    # No other public API shows `with mesh:` (get_abstract_mesh and get_mesh see only jax.set_mesh). The name is
    # deprecated since jax 0.8.2; when it is removed, `with mesh:` will be too, so that nothing is missed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.interpreters import pxla

        return getattr(pxla, "thread_resources", None)


def current_mesh() -> AnyMesh | None:
    """Return the context's mesh: the abstract one in shard_map or jit, else that of jax.set_mesh, else of `with mesh:`."""
    abstract = get_abstract_mesh()
    if not abstract.empty:
        if any(kind is AxisType.Manual for kind in abstract.axis_types):
            return abstract
        try:
            concrete = get_mesh()
        except ValueError:  # under jit only the abstract mesh is available
            return abstract
        # jax.sharding.use_abstract_mesh inside jax.set_mesh: the inner one applies.
        return concrete if concrete.abstract_mesh == abstract else abstract
    resources = _thread_resources()
    if resources is not None and not resources.env.physical_mesh.empty:
        return resources.env.physical_mesh
    return None


def devices_platform(mesh: AnyMesh | None) -> tuple[str, str] | None:
    """Return (platform, device kind) of a mesh's devices, which may be real, described or abstract; None if it has none.

    Platforms are 'tpu', 'cpu', 'cuda', 'rocm', and 'gpu' if the vendor is unknown.
    """
    if isinstance(mesh, Mesh) and mesh.devices.size:
        device = mesh.devices.flat[0]
        return gpu_vendor(device.platform, getattr(device, "client", None)), device.device_kind
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        # Under jit jax returns the abstract mesh, whose platform is 'gpu' for any vendor; it still has the device kind.
        kind = checked_name(abstract.device_kind, "device kind", ShardingError)
        return gpu_vendor(platform_of(abstract), None, kind), kind
    return None


def devices_cores(mesh: AnyMesh | None) -> int | None:
    """The cores of each of a mesh's TPU devices, as jax reports them; None if it has no devices, or they don't say."""
    if isinstance(mesh, Mesh) and mesh.devices.size:
        return getattr(mesh.devices.flat[0], "num_cores", None)
    return getattr(getattr(mesh, "abstract_device", None), "num_cores", None)


def gpu_vendor(platform: str, client: Any, device_kind: str = "") -> str:
    """Turn jax's 'gpu' into 'cuda' or 'rocm', by the runtime's version string or the device's name."""
    if platform != "gpu":
        return platform
    version = f"{getattr(client, 'platform_version', '')} {device_kind}".lower()
    for sign, vendor in (("rocm", "rocm"), ("cuda", "cuda"), ("amd ", "rocm"), ("nvidia", "cuda")):
        if sign in version:
            return vendor
    return "gpu"


def parse_mesh(text: str) -> dict[str, int]:
    """Parse 'fsdp=2,tp=4' into {'fsdp': 2, 'tp': 4}. Errors: ShardingError that shows the expected form."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise ShardingError(
                f"mesh {shown(text)}: {shown(part)} is not AXIS=SIZE; wanted a mesh such as fsdp=2,tp=4."
            )
        if name in sizes:
            raise ShardingError(f"mesh {shown(text)} names the axis {shown(name)} twice; give each axis once.")
        sizes[name] = int(size)
    return sizes


def virtual_mesh(sizes: Mapping[str, int], *, explicit: bool = False) -> Mesh:
    """Make a mesh of this process's devices. Errors: ShardingError if there are too few, or for a size below 1."""
    if not sizes:
        raise ShardingError("a mesh without axes; wanted a mesh such as {'fsdp': 2, 'tp': 4}.")
    _check_sizes(sizes)
    count, have = math.prod(sizes.values()), len(jax.devices())
    if count > have:
        raise ShardingError(
            f"mesh {_sizes_text(sizes)} needs {count} devices, but there are {have}; make the mesh smaller, or, to try "
            f"it on CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={count} before jax starts."
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=jax.devices()[:count]
    )


def mesh_to_dict(mesh: AnyMesh) -> dict[str, Any]:
    """Serialise a mesh as axis names, sizes and types, and the platform of its devices, but not the devices themselves.

    An abstract mesh for which this process has devices is marked as abstract, so that it stays abstract. One without devices
    here gets devices where the file is read, if there are any: so a file written on a laptop runs on a pod.
    """
    axes = axes_of(mesh)
    device = (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device
    platform = (
        devices_platform(mesh) if isinstance(mesh, Mesh) else device and (platform_of(device), device.device_kind)
    )
    data: dict[str, Any] = {
        "axis_names": [a.name for a in axes],
        "axis_sizes": [a.size for a in axes],
        "axis_types": [a.kind for a in axes],
        "platform": platform[0] if platform else None,
        "device_kind": platform[1] if platform else None,
        "num_cores": device.num_cores if device else None,
    }
    if isinstance(mesh, AbstractMesh) and _devices_here(data["platform"], mesh.size):
        data["abstract"] = True
    return data


def mesh_from_dict(data: Mapping[str, Any]) -> AnyMesh:
    """Restore a mesh: on this process's devices if platform and number match, else abstract.

    Errors: ConfigError for unknown keys, duplicate axes, sizes that are not positive integers, an unknown platform.
    """
    known = ("axis_names", "axis_sizes", "axis_types", "platform", "device_kind", "num_cores", "abstract")
    for key in data:
        if key not in known:
            raise ConfigError(f"mesh: unknown key {shown(key)}; wanted {', '.join(known)}." + nearest(key, known))
    for key in known[:3]:
        if not isinstance(data.get(key) or (), list | tuple):
            raise ConfigError(f"mesh: {key}={shown(data[key])}; wanted a list, one of each per axis.")
    names, sizes = tuple(data.get("axis_names") or ()), tuple(data.get("axis_sizes") or ())
    kinds = tuple(data.get("axis_types") or ("auto",) * len(names))
    if not names or not len(names) == len(sizes) == len(kinds):
        raise ConfigError(
            f"mesh: axis_names={shown(names)}, axis_sizes={shown(sizes)}, axis_types={shown(kinds)}; wanted one of each per axis."
        )
    if not all(isinstance(n, str) and n for n in names) or len(set(names)) < len(names):
        raise ConfigError(f"mesh: axis_names={shown(names)}; wanted distinct, non-empty names.")
    for name in names:
        checked_name(name, "mesh: axis")
    if not all(is_whole(size, 1) for size in sizes):
        raise ConfigError(f"mesh: axis_sizes={shown(sizes)}; wanted positive integers.")
    if not all(isinstance(k, str) and k in _TYPES for k in kinds):
        raise ConfigError(f"mesh: axis_types={shown(kinds)}; wanted {', '.join(_TYPES)}.")
    types = tuple(_TYPES[k] for k in kinds)
    platform, kind, cores = (data.get(key) for key in ("platform", "device_kind", "num_cores"))
    if not (kind is None or isinstance(kind, str)):
        raise ConfigError(f"mesh: device_kind={shown(kind)}; wanted a string, as jax.Device.device_kind.")
    checked_name(kind or "", "mesh: device_kind")
    if not (cores is None or is_whole(cores, 1)):
        raise ConfigError(f"mesh: num_cores={shown(cores)}; wanted a positive integer.")
    if not isinstance(data.get("abstract", False), bool):
        raise ConfigError(f"mesh: abstract={shown(data['abstract'])}; wanted true or false.")
    if not (platform is None or platform in _PLATFORMS or _is_here(platform)):
        platforms = ", ".join(_PLATFORMS)
        raise ConfigError(
            f"mesh: platform={shown(platform)}; wanted one of {platforms}." + nearest(platform, _PLATFORMS)
        )
    if not data.get("abstract") and _devices_here(platform, math.prod(sizes)):
        return jax.make_mesh(sizes, names, axis_types=types, devices=jax.devices()[: math.prod(sizes)])
    device = abstract_device(kind or platform, cores, platform) if platform else None
    return AbstractMesh(sizes, names, axis_types=types, abstract_device=device)


def describe_mesh(mesh: AnyMesh | tuple[MeshAxis, ...] | None) -> str:
    """Return 'fsdp=2,tp=4', with the axis type if it isn't auto, or 'none'."""
    axes = axes_of(mesh)
    return ",".join(f"{a.name}={a.size}" + ("" if a.kind == "auto" else f"({a.kind})") for a in axes) or "none"


def device_name(device: jax.Device) -> str:
    """Return 'cpu:3': JAX's own names for devices differ by its version and by platform."""
    return f"{device.platform}:{device.id}"


def _is_here(platform: Any) -> bool:
    device = jax.devices()[0]
    return platform in (device.platform, gpu_vendor(device.platform, device.client))


def _devices_here(platform: str | None, count: int) -> bool:
    return (platform is None or _is_here(platform)) and count <= len(jax.devices())


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if not is_whole(size, 1, numpy=True):
            raise ShardingError(f"mesh axis {shown(name)} has size {shown(size)}; wanted a positive integer.")


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def same_devices(mesh: Mesh, array: jax.Array) -> bool:
    """Whether a committed array is already on the devices of a mesh, in the mesh's order. jit refuses other devices."""
    if isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh):
        return np.array_equal(np.ravel(array.sharding.mesh.devices), np.ravel(mesh.devices))
    return mesh.size == 1 and set(np.ravel(mesh.devices)) == array.sharding.device_set
