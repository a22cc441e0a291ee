"""What a command plans for or runs on: an abstract mesh, described TPUs or GPUs, or this machine's devices."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..errors import ConfigError, ShardingError, nearest
from ..planning import METHODS
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..sharding import describe_mesh, mesh_to_dict, parse_mesh, virtual_mesh
from ..sharding.mesh import AnyMesh, gpu_vendor
from ..verify.generations import has_libtpu
from ..verify.gpu.gpu_target import is_gpu_target
from ..verify.targets import device_names, devices_named, target_of
from ..verify.topology import described_mesh

__all__ = ["TargetOptions", "declared_sizes", "here", "plan_metadata", "run_metadata", "targeted"]

# More virtual devices than this are taken for a typing error: each costs a thread pool.
_MOST_VIRTUAL = 256


def here() -> tuple[str, str]:
    """(platform, device kind) of this machine's default devices. Starts jax's backend."""
    device = jax.devices()[0]
    return gpu_vendor(device.platform, device.client), device.device_kind


@dataclass(frozen=True)
class TargetOptions:
    """The options that choose the target; None or False for options not given."""

    mesh: str | None = None
    platform: str | None = None
    topology: str | None = None
    strict: bool = False
    fallback: str | None = None


def targeted(declaration: Declaration, options: TargetOptions) -> Declaration:
    """The declaration with these options applied: it is what is planned, and a file with it gives the same plan.

    Errors: ConfigError and ShardingError for invalid options.
    """
    platform, topology = options.platform, options.topology
    sizes = declared_sizes(options.mesh, declaration)
    named = None
    if platform is not None and platform not in METHODS:
        count = 1 if sizes is None else math.prod(sizes.values())
        named = devices_named(platform, count)
        if named is None:
            raise ConfigError(_unknown_platform(platform))
    gpus = topology is not None and is_gpu_target(topology)
    if topology is not None and platform not in ((None, "cuda", "gpu") if gpus else (None, "tpu")):
        kind = "NVIDIA's GPUs" if gpus else "TPUs"
        raise ConfigError(
            f"--topology {topology} describes {kind}, but --platform is {platform}; leave one of them out."
        )
    metadata = dict(declaration.metadata)
    if options.strict:
        metadata["strict"] = True
    if options.fallback is not None:
        metadata["fallback"] = options.fallback
    if topology is not None:
        metadata["mesh"] = mesh_to_dict(_described(topology, sizes))
    elif options.mesh is not None:
        metadata["mesh"] = parse_mesh(options.mesh)
    if platform is not None or topology is not None:
        metadata = {name: value for name, value in metadata.items() if name not in ("platform", "backend")}
    if named is not None:
        metadata["mesh"] = mesh_to_dict(named.abstract({"fsdp": 1} if sizes is None else sizes))
    elif platform is not None and topology is None:
        metadata["backend"] = platform
        if sizes is not None:  # a mesh has its own platform
            metadata["mesh"] = _named_axes(metadata["mesh"]) | {
                "platform": platform,
                "device_kind": None,
                "num_cores": None,
            }
    return declaration.model_copy(update={"metadata": metadata}).checked()


def _described(topology: str, sizes: dict[str, int] | None) -> AnyMesh:
    """The described devices. Only libtpu knows how TPUs are arranged; without it, generation and number are enough to plan."""
    if not is_gpu_target(topology) and has_libtpu():
        return described_mesh(topology, sizes)
    target = target_of(topology)
    return target.mesh({"fsdp": target.count} if sizes is None else sizes)


def _unknown_platform(platform: str) -> str:
    names = (*METHODS, *device_names())
    if devices_named(platform.partition(":")[0], 1) is not None:
        return f"--platform {platform} describes a topology; use --topology {platform}."
    return f"--platform {platform}: wanted one of {', '.join(names)}.{nearest(platform, names)}"


def plan_metadata(declaration: Declaration) -> OperationMetadata:
    """The metadata with an abstract mesh, which needs no devices."""
    if declared_sizes(None, declaration) is None:
        return declaration.operation_metadata()
    return declaration.operation_metadata({"mesh": _named_axes(declaration.metadata["mesh"]) | {"abstract": True}})


def _named_axes(mesh: Mapping[str, Any]) -> dict[str, Any]:
    """The spelling of a mesh that can hold a platform."""
    if "axis_names" in mesh or "axis_sizes" in mesh:
        return dict(mesh)
    return {"axis_names": list(mesh), "axis_sizes": list(mesh.values())}


def run_metadata(declaration: Declaration, *, mesh: str | None) -> OperationMetadata:
    """The metadata on this machine's devices; on CPU with as many virtual devices as the mesh needs.

    Errors: ShardingError if there are too few devices, ConfigError if the config requires another platform.
    """
    sizes = declared_sizes(mesh, declaration)
    if sizes is not None:
        _make_cpu_devices(math.prod(sizes.values()))
    changes = {} if mesh is None or sizes is None else {"mesh": virtual_mesh(sizes)}
    metadata = declaration.operation_metadata(changes)
    stored = metadata.mesh
    platform, _ = here()
    if stored is not None and not isinstance(stored, Mesh):
        raise ShardingError(
            f"metadata.mesh {describe_mesh(stored)} can't be made of this machine's devices ({len(jax.devices())} of "
            f"{platform}); run it elsewhere, or give --mesh."
        )
    for name in ("platform", "backend"):
        wanted = getattr(metadata, name)
        if wanted is not None and wanted != platform and not (wanted == "gpu" and platform in ("cuda", "rocm")):
            raise ConfigError(
                f"metadata.{name} is {wanted!r}, but this machine's devices are {platform}; run it there, use "
                f"`attnops plan`, or leave {name} out."
            )
    return metadata


def declared_sizes(mesh: str | None, declaration: Declaration) -> dict[str, int] | None:
    """The mesh's sizes, from the option or else from the config."""
    if mesh is not None:
        return parse_mesh(mesh)
    declared = declaration.metadata.get("mesh")
    if not isinstance(declared, Mapping):
        return None
    names, sizes = declared.get("axis_names"), declared.get("axis_sizes")
    found = dict(declared)
    if isinstance(names, list) and isinstance(sizes, list):
        found = dict(zip(names, sizes, strict=False))
    # An invalid mesh is left to OperationMetadata, which says what is wrong with it.
    sound = found and all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in found.values())
    return found if sound else None


def _make_cpu_devices(count: int) -> None:
    """Request virtual CPU devices. This has no effect on other platforms."""
    if count > _MOST_VIRTUAL:
        raise ShardingError(
            f"mesh of {count} devices: `run` makes at most {_MOST_VIRTUAL} virtual ones; `attnops plan` needs none."
        )
    if count == 1 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # none needed, or the user has set the number
    # RuntimeError: the backend is already running. virtual_mesh checks whether it has enough devices.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
