"""Pin arrays to their specs: a constraint on Auto axes, a reshard on Explicit axes, nothing on Manual axes."""

from __future__ import annotations

from collections.abc import Set

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .mesh import AnyMesh, same_devices

__all__ = ["only", "pin", "place"]


def pin(array: jax.Array, spec: PartitionSpec, mesh: AnyMesh | None) -> jax.Array:
    """Return the array with `spec` applied on `mesh`, while tracing.

    On a mesh of mixed axis types each axis is treated by its own type; a Manual axis is left out of the spec.
    """
    if mesh is None or mesh.empty:
        return array
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {n for n, k in kinds.items() if k is AxisType.Explicit}
    auto = {n for n, k in kinds.items() if k is AxisType.Auto}
    if explicit:
        # Explicit axes are part of the array's type: reshard changes them, but refuses Auto axes.
        array = jax.sharding.reshard(array, NamedSharding(mesh, only(spec, explicit)))
    if auto:
        # ... and the constraint refuses Explicit axes, so on a mixed mesh each gets only its own axes.
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, only(spec, auto)))
    return array


def place(array: jax.Array | np.ndarray, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Put a concrete array on the mesh's devices if it isn't there yet (outside of tracing)."""
    if not isinstance(array, jax.Array):
        return jax.device_put(array, NamedSharding(mesh, spec))
    if array.committed and not same_devices(mesh, array):
        return jax.device_put(array, NamedSharding(mesh, spec))
    return array


def only(spec: PartitionSpec, names: Set[str]) -> PartitionSpec:
    """The spec with only these axes."""

    def keep(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if entry is None:
            return None
        remaining = tuple(n for n in ((entry,) if isinstance(entry, str) else entry) if n in names)
        return None if not remaining else remaining[0] if len(remaining) == 1 else remaining

    return PartitionSpec(*(keep(e) for e in spec))
