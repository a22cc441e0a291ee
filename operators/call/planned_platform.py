"""planned_platform: the platform that a call is planned for, and the source of that."""

from __future__ import annotations

from typing import Any

import jax

from ...errors import InputError
from ...registry import OperationMetadata
from ...sharding import devices_platform
from ...sharding.mesh import AnyMesh
from .current_device import current_device

__all__ = ["planned_platform"]


def planned_platform(metadata: OperationMetadata, mesh: AnyMesh | None, arrays: Any) -> tuple[str, str, str]:
    """(platform, device kind, source): the mesh's devices, else backend or platform, else where jax would run the call.

    `arrays` is a tree of the call's arrays. Errors: InputError if metadata.platform differs.
    """
    of_mesh = devices_platform(mesh)
    device = current_device(jax.tree.leaves(arrays))
    if of_mesh is not None:
        platform, kind, source = *of_mesh, "the mesh's devices"
    elif metadata.backend is not None:
        platform, kind, source = metadata.backend, "", "metadata.backend"
    elif metadata.platform is not None:
        platform, kind, source = metadata.platform, "", "metadata.platform"
    else:
        platform, kind, source = device
    if platform == "gpu" and device.platform in ("cuda", "rocm"):
        # jax calls every vendor's GPUs 'gpu'; the process's own GPUs tell the vendor.
        platform, kind = device.platform, device.device_kind
    elif platform in ("cuda", "rocm") and not kind and device.platform == platform:
        kind = device.device_kind
    elif platform == "gpu" and kind.startswith("NVIDIA"):  # described GPUs that aren't here
        platform = "cuda"
    declared = metadata.platform
    if declared is not None and declared != platform and not (declared == "gpu" and platform in ("cuda", "rocm")):
        raise InputError(
            f"metadata.platform={declared!r}, but {source} says {platform!r}; leave platform out, or plan for {declared} with a "
            "mesh made of its (described) devices."
        )
    return platform, kind, source
