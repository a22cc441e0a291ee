"""Meshes: finding the current one, its axes and platform, and writing one down as names and sizes."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, get_abstract_mesh, get_mesh

from ..errors import ConfigError, ShardingError, nearest

__all__ = [
    "AnyMesh",
    "MeshAxis",
    "axes_of",
    "current_mesh",
    "describe_mesh",
    "devices_platform",
    "mesh_from_dict",
    "mesh_to_dict",
    "parse_mesh",
    "virtual_mesh",
]

AnyMesh = Mesh | AbstractMesh
_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}


class MeshAxis(NamedTuple):
    """One axis of a mesh: its name, its size and 'auto', 'explicit' or 'manual'."""

    name: str
    size: int
    kind: str = "auto"


def axes_of(mesh: AnyMesh | Mapping[str, int] | tuple[MeshAxis, ...] | None) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh, of a {name: size} mapping, or nothing for None. Needs no devices."""
    if mesh is None:
        return ()
    if isinstance(mesh, tuple):
        return mesh
    if isinstance(mesh, Mapping):
        return tuple(MeshAxis(name, size) for name, size in mesh.items())
    return tuple(
        MeshAxis(str(name), size, _TYPE_NAMES[kind])
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    )


@functools.cache
def _thread_resources() -> Any | None:
    # `with mesh:` is visible in no other public place (get_abstract_mesh and get_mesh see jax.set_mesh only). The
    # name is deprecated since jax 0.8.2; once it is gone, so is `with mesh:`, and there is nothing left to see.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.interpreters import pxla

        return getattr(pxla, "thread_resources", None)


def current_mesh() -> AnyMesh | None:
    """Return the mesh of the context: inside shard_map or jit the abstract one, else `jax.set_mesh`, else `with mesh:`."""
    abstract = get_abstract_mesh()
    if not abstract.empty:
        if any(kind is AxisType.Manual for kind in abstract.axis_types):
            return abstract
        try:
            concrete = get_mesh()
        except ValueError:  # under jit only the abstract mesh can be asked for
            return abstract
        return abstract if concrete.empty else concrete
    resources = _thread_resources()
    if resources is not None and not resources.env.physical_mesh.empty:
        return resources.env.physical_mesh
    return None


def devices_platform(mesh: AnyMesh | None) -> tuple[str, str] | None:
    """Return (platform, device kind) of a mesh's devices, real, described or abstract; None if it has none.

    Platforms are 'tpu', 'cpu', 'cuda', 'rocm', and 'gpu' where the vendor can't be told.
    """
    if isinstance(mesh, Mesh) and mesh.devices.size:
        device = mesh.devices.flat[0]
        return gpu_vendor(device.platform, getattr(device, "client", None)), device.device_kind
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        return abstract.platform, abstract.device_kind
    return None


def gpu_vendor(platform: str, client: Any) -> str:
    """Turn jax's 'gpu' into 'cuda' or 'rocm' by what the runtime says of itself."""
    if platform != "gpu":
        return platform
    version = str(getattr(client, "platform_version", "")).lower()
    for vendor in ("rocm", "cuda"):
        if vendor in version:
            return vendor
    return "gpu"


def parse_mesh(text: str) -> dict[str, int]:
    """Parse 'fsdp=2,tp=4' into {'fsdp': 2, 'tp': 4}. Errors: ShardingError that shows the form."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise ShardingError(f"mesh {text!r}: {part!r} is not AXIS=SIZE; wanted for example fsdp=2,tp=4.")
        if name in sizes:
            raise ShardingError(f"mesh {text!r} names the axis {name!r} twice; give each axis once.")
        sizes[name] = int(size)
    return sizes


def virtual_mesh(sizes: Mapping[str, int], *, explicit: bool = False) -> Mesh:
    """Make a mesh of this process's devices. Errors: ShardingError when there are too few."""
    wanted, have = math.prod(sizes.values()), len(jax.devices())
    if wanted > have:
        raise ShardingError(
            f"mesh {_sizes_text(sizes)} needs {wanted} devices and {have} are there; make the mesh smaller, or, to try "
            f"it on CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before jax starts."
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=jax.devices()[:wanted]
    )


def mesh_to_dict(mesh: AnyMesh) -> dict[str, Any]:
    """Write a mesh down as axis names, sizes and types, and the platform of its devices."""
    axes = axes_of(mesh)
    platform = devices_platform(mesh)
    return {
        "axis_names": [a.name for a in axes],
        "axis_sizes": [a.size for a in axes],
        "axis_types": [a.kind for a in axes],
        "platform": platform[0] if platform else None,
        "device_kind": platform[1] if platform else None,
    }


def mesh_from_dict(data: Mapping[str, Any]) -> AnyMesh:
    """Build the mesh again: on this process's devices where they match in platform and number, else abstract.

    Errors: ConfigError for unknown keys, duplicate axes or sizes that are not positive integers.
    """
    known = ("axis_names", "axis_sizes", "axis_types", "platform", "device_kind")
    for key in data:
        if key not in known:
            raise ConfigError(f"mesh: unknown key {key!r}; wanted {', '.join(known)}." + nearest(key, known))
    names, sizes = tuple(data.get("axis_names", ())), tuple(data.get("axis_sizes", ()))
    kinds = tuple(data.get("axis_types") or ("auto",) * len(names))
    if not names or not len(names) == len(sizes) == len(kinds):
        raise ConfigError(f"mesh: axis_names={names}, axis_sizes={sizes}, axis_types={kinds}; wanted one of each per axis.")
    if len(set(names)) < len(names) or not all(isinstance(n, str) and n for n in names):
        raise ConfigError(f"mesh: axis_names={names}; wanted distinct, non-empty names.")
    if not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes):
        raise ConfigError(f"mesh: axis_sizes={sizes}; wanted positive integers.")
    if not all(k in _TYPES for k in kinds):
        raise ConfigError(f"mesh: axis_types={kinds}; wanted {', '.join(_TYPES)}.")
    types = tuple(_TYPES[k] for k in kinds)
    platform, kind = data.get("platform"), data.get("device_kind")
    here = jax.devices()
    if platform in (None, gpu_vendor(here[0].platform, here[0].client)) and math.prod(sizes) <= len(here):
        return jax.make_mesh(sizes, names, axis_types=types, devices=here[: math.prod(sizes)])
    device = AbstractDevice(device_kind=kind or platform, num_cores=None, platform=platform) if platform else None
    return AbstractMesh(sizes, names, axis_types=types, abstract_device=device)


def describe_mesh(mesh: AnyMesh | tuple[MeshAxis, ...] | None) -> str:
    """Return 'fsdp=2,tp=4', with the axis type where it is not auto, or 'none'."""
    axes = axes_of(mesh)
    return ",".join(f"{a.name}={a.size}" + ("" if a.kind == "auto" else f"({a.kind})") for a in axes) or "none"


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def same_devices(mesh: Mesh, array: jax.Array) -> bool:
    """Whether a committed array already lives on exactly the devices of a mesh."""
    return set(np.ravel(mesh.devices)) == array.sharding.device_set
