"""What can be planned but not run: shapes without values, a mesh without devices, a platform that isn't here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, get_abstract_mesh

from ...errors import InputError, InputTypeError
from ...sharding import describe_mesh
from ...sharding.mesh import AnyMesh
from .current_device import current_device

__all__ = ["check_devices"]


def check_devices(leaves: Sequence[Any], mesh: AnyMesh | None, devices: int, platform: str, source: str) -> None:
    """Refuse a call of these arrays that was planned for a number of devices of a platform, read from `source`.

    Errors: InputTypeError for shapes, InputError for a mesh that isn't available here, and for another platform.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise InputTypeError("a ShapeDtypeStruct has no values to attend with; pass arrays, or call plan().")
    tracing = any(isinstance(x, jax.core.Tracer) for x in leaves)
    if isinstance(mesh, AbstractMesh) and not mesh.manual_axes and not tracing:
        raise InputError(
            f"mesh {describe_mesh(mesh)} has no devices, so this can be planned and lowered but not run; pass a Mesh of devices."
        )
    context = get_abstract_mesh()
    if mesh is not None and not context.empty and not context.manual_axes and devices > 1:
        planned_mesh = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        if (planned_mesh.axis_names, planned_mesh.axis_sizes) != (context.axis_names, context.axis_sizes):
            raise InputError(
                f"declared mesh {describe_mesh(mesh)}, but the context's (jax.set_mesh) is {describe_mesh(context)}, and "
                "jax takes no other inside it; declare none, or the same."
            )
    running = current_device(leaves)
    if not tracing and mesh is None and not running.serves(platform):
        raise InputError(
            f"planned for {platform} (from {source}), but this call runs on {running.platform} (from {running.source}); leave "
            f"that out to run here, or plan() it and lower it for {platform}."
        )
