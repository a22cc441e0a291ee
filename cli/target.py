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

from ..errors import ConfigError, ShardingError
from ..planning import METHODS
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..sharding import describe_mesh, mesh_to_dict, parse_mesh, virtual_mesh
from ..sharding.mesh import AnyMesh, gpu_vendor
from ..verify.targets import cpu_count, devices_named, target_of

__all__ = [
    "HERE",
    "TargetOptions",
    "declared_sizes",
    "here",
    "plan_metadata",
    "run_metadata",
    "target_mesh",
    "targeted",
]

HERE = "here"  # the target's name for this machine's devices

# More virtual devices than this are taken for a typing error: each costs a thread pool.
_MAX_VIRTUAL = 256


def here() -> tuple[str, str]:
    """(platform, device kind) of this machine's default devices. Starts jax's backend."""
    device = jax.devices()[0]
    return gpu_vendor(device.platform, device.client), device.device_kind


@dataclass(frozen=True)
class TargetOptions:
    """The options that choose the target; None or False for options not given."""

    mesh: str | None = None
    target: str | None = None
    strict: bool = False
    fallback: str | None = None


def targeted(declaration: Declaration, options: TargetOptions) -> Declaration:
    """The declaration with these options applied: it is what is planned, and a file with it gives the same plan.

    Errors: ConfigError and ShardingError for invalid options.
    """
    metadata = dict(declaration.metadata)
    if options.strict:
        metadata["strict"] = True
    if options.fallback is not None:
        metadata["fallback"] = options.fallback
    if options.target is not None:
        if declared_sizes(options.mesh, declaration) is None:
            plan_metadata(declaration)  # a target's mesh mustn't hide what is wrong with the declared one
        metadata = {name: value for name, value in metadata.items() if name not in ("platform", "backend")}
        metadata |= _of_target(options.target, options.mesh, declaration)
    elif options.mesh is not None:
        metadata["mesh"] = parse_mesh(options.mesh)
    return declaration.model_copy(update={"metadata": metadata}).checked()


def _of_target(target: str, mesh: str | None, declaration: Declaration) -> dict[str, Any]:
    """The platform and the mesh of a target: a platform, devices by name, or a number of them."""
    sizes = declared_sizes(mesh, declaration)
    cpus = cpu_count(target)
    if target in METHODS or cpus is not None:
        platform = target.partition(":")[0]
        if cpus is not None:
            sizes = _of_size(sizes, cpus, target, mesh)
        if sizes is None:
            return {"backend": platform}
        axes = _named_axes(sizes if mesh is not None or cpus is not None else declaration.metadata["mesh"])
        return {"backend": platform, "mesh": axes | {"platform": platform, "device_kind": None, "num_cores": None}}
    named = devices_named(target, 1 if sizes is None else math.prod(sizes.values()))
    if named is not None:
        return {"mesh": mesh_to_dict(named.abstract({"fsdp": 1} if sizes is None else sizes))}
    return {"mesh": mesh_to_dict(target_mesh(target, mesh, declaration))}


def target_mesh(target: str, mesh: str | None, declaration: Declaration) -> AnyMesh:
    """The devices of a topology or of GPUs, arranged by --mesh, else as the declared mesh, else along fsdp.

    Errors: ConfigError for another name; ShardingError for a mesh of another size.
    """
    described = target_of(target)
    return described.mesh(_of_size(declared_sizes(mesh, declaration), described.count, target, mesh))


def _of_size(sizes: dict[str, int] | None, count: int, target: str, mesh: str | None) -> dict[str, int]:
    if sizes is None:
        return {"fsdp": count}
    if math.prod(sizes.values()) != count:
        sizes_text = ",".join(f"{name}={size}" for name, size in sizes.items())
        where, hint = (
            ("the declared mesh", " Hint: --mesh arranges the target's devices.") if mesh is None else ("--mesh", "")
        )
        raise ShardingError(
            f"{where} {sizes_text} has {math.prod(sizes.values())} devices and {target} has {count}; wanted as many.{hint}"
        )
    return sizes


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
        declared = getattr(metadata, name)
        if declared is not None and declared != platform and not (declared == "gpu" and platform in ("cuda", "rocm")):
            raise ConfigError(
                f"metadata.{name} is {declared!r}, but this machine's devices are {platform}; run it there, use "
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
    mesh_sizes = dict(declared)
    if isinstance(names, list) and isinstance(sizes, list):
        mesh_sizes = dict(zip(names, sizes, strict=False))
    # An invalid mesh is left to OperationMetadata, which says what is wrong with it.
    sound = mesh_sizes and all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in mesh_sizes.values())
    return mesh_sizes if sound else None


def _make_cpu_devices(count: int) -> None:
    """Request virtual CPU devices. This has no effect on other platforms."""
    if count > _MAX_VIRTUAL:
        raise ShardingError(
            f"mesh of {count} devices: `run` makes at most {_MAX_VIRTUAL} virtual ones; `attnops plan` needs none."
        )
    if count == 1 or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # none needed, or the user has set the number
    # RuntimeError: the backend is already running. virtual_mesh checks whether it has enough devices.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
