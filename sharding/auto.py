"""Explicit axes as Auto ones, for code that indexes: with Explicit axes, a gather, a scatter or a vmap over a split dimension
needs operands that are split alike, and those of a caller needn't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

__all__ = ["on_auto_axes", "spec_of"]

_Result = TypeVar("_Result")


def on_auto_axes(run: Callable[..., _Result], *arrays: Any, specs: Callable[[], Any]) -> _Result:
    """run(*arrays) with the Explicit axes of the arrays' mesh as Auto ones.

    specs: the results' specs, in the structure of the results, wanted only if there are such axes.
    """
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        return run(*arrays)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)):
        arrays = _on_one_mesh(arrays)
    axes = tuple(n for n, k in zip(mesh.axis_names, mesh.axis_types, strict=True) if k is AxisType.Explicit)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(), is_leaf=_is_spec)
    result: _Result = jax.sharding.auto_axes(run, axes=axes, out_sharding=places)(*arrays)
    return result


def spec_of(array: Any) -> PartitionSpec:
    """The Explicit axes that split an array, as its type has them."""
    spec: PartitionSpec = jax.typeof(array).sharding.spec
    return spec


def _on_one_mesh(arrays: Any) -> Any:
    """Outside of jit, which moves uncommitted arrays to the devices of the others."""
    places = (x.sharding for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array) and x.committed)
    mesh = next(place.mesh for place in places if isinstance(place, NamedSharding))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) and x.committed else jax.device_put(x, whole), arrays)


def _explicit_mesh(tree: Any) -> AbstractMesh | None:
    for x in jax.tree.leaves(tree):
        mesh: AbstractMesh = jax.typeof(x).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)
