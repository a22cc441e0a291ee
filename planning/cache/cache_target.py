"""What a cache is planned for: a kind of device, its memory, and the bytes of an array there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ...devices import SCALAR_BYTES, spec_of_kind, tpu_of
from ...errors import ConfigError, shown
from ...names import checked_name
from ...sharding import FittedSpec, MeshAxis, devices_platform
from ...sharding.mesh import AnyMesh, devices_cores, gpu_vendor
from ..tiles import lanes_of, least_tiled
from .cache_checks import axis_names

__all__ = ["CacheTarget", "cache_target", "device_bytes", "state_bytes", "ways"]

_config: Any = jax.config
_PLATFORMS = ("cpu", "cuda", "rocm", "gpu", "tpu")


class CacheTarget(NamedTuple):
    """What a cache is planned for. Bytes of scalar memory and of memory are None if unknown."""

    platform: str
    kind: str
    scalars: int | None
    memory: int | None


def device_bytes(fitted: FittedSpec, itemsize: int, target: CacheTarget) -> int:
    """Bytes per device of an array; on a TPU with the last dimension of pages padded."""
    if target.platform != "tpu" or len(fitted.shape) < 4:
        return fitted.local_bytes
    *rest, lanes = fitted.local_shape
    return math.prod(rest) * lanes_of(lanes) * itemsize


def state_bytes(fitted: FittedSpec, itemsize: int, target: CacheTarget) -> int:
    """Bytes per device of an array of slots; on a TPU with what its tiles pad."""
    shape = fitted.local_shape
    return least_tiled(shape) * itemsize if target.platform == "tpu" and len(shape) > 1 else fitted.local_bytes


def ways(declared: Any, axes: tuple[MeshAxis, ...]) -> int:
    """The number of parts into which the declared mesh axes split. Manual axes are the caller's and don't count."""
    return math.prod(axis.size for axis in axes if axis.name in axis_names(declared) and axis.kind != "manual")


def cache_target(mesh: AnyMesh | None, device_kind: str | None) -> CacheTarget:
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
            return CacheTarget(platform, kind, SCALAR_BYTES, _memory(real))
        return CacheTarget(platform, kind, device.scalar_bytes, _memory(real) or device.hbm_bytes)
    spec = spec_of_kind(kind)
    return CacheTarget(platform, kind, None, _memory(real) or (None if spec is None else spec.hbm_bytes))


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
