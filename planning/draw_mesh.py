"""What pictures of plans share: which part of each tensor every device of the mesh holds, and groups of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from ..drawing import DrawnTensor, Split
from ..errors import ShardingError
from ..sharding import FittedSpec, MeshAxis, axes_of, describe_mesh
from ..sharding.mesh import AnyMesh
from .text import spec_text

__all__ = ["device_ids", "groups_along", "placed", "sizes_of"]


class _Placement(NamedTuple):
    """How a tensor is placed."""

    dims: tuple[Split, ...]
    drops: tuple[tuple[str, str, str], ...]
    spec: str


def sizes_of(axes: Sequence[MeshAxis]) -> tuple[tuple[str, int], ...]:
    """(name, size) of each axis."""
    return tuple((axis.name, axis.size) for axis in axes)


def device_ids(axes: Sequence[MeshAxis], mesh: AnyMesh | None) -> tuple[int, ...]:
    """The ids of the mesh's devices, or numbers where it has none. Errors: ShardingError if the plan is for other axes."""
    if mesh is not None and sizes_of(axes_of(mesh)) != sizes_of(axes):
        raise ShardingError(
            f"this plan is for mesh {describe_mesh(tuple(axes))}, but the mesh to draw is {describe_mesh(mesh)}; give "
            "draw(mesh) the mesh that the call will run on, or leave it out."
        )
    if isinstance(mesh, Mesh):
        return tuple(device.id for device in mesh.devices.flat)
    return tuple(range(math.prod(axis.size for axis in axes)))


def placed(tensors: Iterable[tuple[str, FittedSpec]], axes: Sequence[MeshAxis]) -> Iterator[DrawnTensor]:
    """Tensors by name. Those with the same placement and the same dimension names are drawn as one."""
    alike: dict[_Placement, list[tuple[str, FittedSpec]]] = {}
    for name, fitted in tensors:
        drops = tuple((d.axis, d.dim, d.reason) for d in fitted.dropped if not d.harmless)
        alike.setdefault(_Placement(_dims(fitted, axes), drops, spec_text(fitted.spec)), []).append((name, fitted))
    where = _coordinates(axes)
    for key, group in alike.items():
        parts = tuple(tuple(_part(dim, at, axes) for dim in key.dims) for at in where)
        yield DrawnTensor(tuple(name for name, _ in group), key.spec, _shape(group[0][1]), key.dims, parts, key.drops)


def groups_along(axes: Sequence[MeshAxis], along: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that differ only along these axes; () if the axes have one device."""
    names, sizes = [axis.name for axis in axes], [axis.size for axis in axes]
    within = [names.index(axis) for axis in along]
    if math.prod(sizes[i] for i in within) == 1:
        return ()
    others = [i for i in range(len(names)) if i not in within]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose(*others, *within)
    return tuple(tuple(map(int, group)) for group in places.reshape(-1, math.prod(sizes[i] for i in within)))


def _coordinates(axes: Sequence[MeshAxis]) -> list[dict[str, int]]:
    """The coordinate of each device along each axis, in the mesh's order."""
    sizes = [axis.size for axis in axes]
    coordinates = (
        np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=-1) if sizes else np.zeros((1, 0), int)
    )
    return [dict(zip((axis.name for axis in axes), map(int, row), strict=True)) for row in coordinates]


def _dims(fitted: FittedSpec, axes: Sequence[MeshAxis]) -> tuple[Split, ...]:
    sizes = dict(sizes_of(axes))
    splits = []
    for index, (name, size, local) in enumerate(zip(fitted.dims, fitted.shape, fitted.local_shape, strict=True)):
        split = tuple(axis for axis in fitted.axes(index) if sizes[axis] > 1)
        splits.append(Split(name, size, split, size // local if local else 1))
    return tuple(splits)


def _part(dim: Split, at: dict[str, int], axes: Sequence[MeshAxis]) -> int:
    """The part of a dimension that a device holds; the first axis of the spec's entry is the most significant."""
    if dim.parts == 1:
        return 0
    sizes = dict(sizes_of(axes))
    part = 0
    for axis in dim.axes:
        part = part * sizes[axis] + at[axis]
    return part


def _shape(fitted: FittedSpec) -> str:
    return f"{'x'.join(map(str, fitted.shape))} -> {'x'.join(map(str, fitted.local_shape))}"
