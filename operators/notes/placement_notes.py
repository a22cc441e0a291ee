"""What a plan says of arrays that are given on other devices, or split differently, than declared: from, to, bytes sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ...errors import InputError
from ...planning import Plan
from ...planning.notes import note
from ...planning.text import spec_text
from ...sharding.mesh import AnyMesh, describe_mesh, device_name, same_devices
from ...sharding.moved import Parts, comparable, lacking, parts_of
from ...symbolic import is_symbolic
from ..call.arrays import Arrays

__all__ = ["moved_notes"]


class _CallArray(NamedTuple):
    """An array of the call that already has a place. `tensor`: its name among the fitted specs, '' if it has none."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    itemsize: int
    sharding: Sharding
    elsewhere: bool


def moved_notes(plan: Plan, arrays: Arrays, mesh: AnyMesh | None) -> tuple[str, ...]:
    """A note for each array that the call moves: committed to devices other than the mesh's, or split differently than declared.

    Arrays that aren't committed, NumPy's among them, have no place yet. The bytes are a lower bound: what a
    device needs and doesn't hold. Errors: InputError for a ShapeDtypeStruct whose sharding doesn't divide its shape.
    """
    if mesh is None or any(axis.kind == "manual" for axis in plan.problem.mesh):
        return ()
    return tuple(text for array in _call_arrays(plan, arrays, mesh) if (text := _note(array, plan, mesh)))


def _call_arrays(plan: Plan, arrays: Arrays, mesh: AnyMesh) -> Iterator[_CallArray]:
    named = [(name, name, x) for name, x in arrays.by_name.items()]
    # The mask argument's own arrays come first among those of the whole mask.
    leaves = zip(plan.problem.leaves, arrays.mask_leaves, strict=False)
    named += [(f"mask ({leaf.name})", "mask" if leaf.name == "mask" else "", x) for leaf, x in leaves]
    for name, tensor, x in named:
        sharding = _place(x)
        if sharding is not None and not any(map(is_symbolic, x.shape)):  # the bytes would be unknown
            elsewhere = isinstance(mesh, Mesh) and not _abstract(sharding) and not same_devices(mesh, x)
            yield _CallArray(name, tensor, x.shape, x.dtype.itemsize, sharding, elsewhere)


def _place(x: Any) -> Sharding | None:
    """Where an array is; None if that isn't specified yet."""
    if isinstance(x, jax.core.Tracer):
        typed = jax.typeof(x).sharding
        kinds = {kind for kind, size in zip(typed.mesh.axis_types, typed.mesh.axis_sizes, strict=True) if size > 1}
        return typed if kinds == {AxisType.Explicit} else None
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


def _note(array: _CallArray, plan: Plan, mesh: AnyMesh) -> str | None:
    """Where it comes from, where it goes, and what is sent; None if it is placed as declared."""
    if not array.elsewhere and plan.placement.fitted.get(array.tensor) is None:
        return None  # small, and without a declared placement
    declared = NamedSharding(mesh, plan.placement.call_spec(array.tensor, array.shape))
    comes: dict[str, Any] = {"array": array.name, "given": _words(array, mesh)}
    if not comparable(array.sharding, declared):
        return note("moved.unknown", **comes, wanted=_text(declared.spec, array))
    positions = _abstract(array.sharding) or _abstract(declared)
    source = parts_of(array.sharding, array.shape, positions=positions)
    if source is None:
        raise InputError(
            f"{array.name} comes {comes['given']}, which doesn't divide its shape {array.shape}; give it another sharding."
        )
    target_parts = _parts(declared, array, positions)
    if _alike(source, target_parts):
        return None
    # An array on other devices is moved to the declared placement. Any other array enters the program as it is, and is then moved
    # directly to where the operation requires it.
    target = declared if array.elsewhere else NamedSharding(mesh, _inside(plan, array, declared.spec))
    target_text = _text(target.spec, array)
    if _text(declared.spec, array) != target_text:
        target_text += f" (declared {_text(declared.spec, array)})"
    needed = _parts(target, array, positions)
    sent = lacking(source, needed) * array.itemsize
    if not sent.any():
        return note("moved.nothing", **comes, wanted=target_text, size=int(source.sizes.max()) * array.itemsize)
    max_sent = int(sent.max())
    if (sent == sent[0]).all():
        return note("moved.each", **comes, wanted=target_text, size=max_sent)
    return note("moved.some", **comes, wanted=target_text, size=max_sent, total=int(sent.sum()))


def _inside(plan: Plan, array: _CallArray, declared: PartitionSpec) -> PartitionSpec:
    """Where the operation requires a tensor at its entry, in the caller's layout."""
    problem, placement = plan.problem, plan.placement
    if array.tensor not in ("query", "key", "value"):
        return placement.spec("bias") if array.tensor == "bias" else declared
    entries = list(placement.spec(array.tensor))
    if array.tensor != "query" and placement.kv_repeat > 1:
        entries[problem.kernel_layout.index("h")] = None  # its heads are repeated first
    return PartitionSpec(*entries[1 if problem.layout == "thd" else 0 :])


def _parts(sharding: NamedSharding, array: _CallArray, positions: bool) -> Parts:
    parts = parts_of(sharding, array.shape, positions=positions)
    assert parts is not None, f"{sharding.spec} was fitted to {array.shape}"
    return parts


def _alike(source: Parts, target: Parts) -> bool:
    same = set(source.devices) == set(target.devices)
    return same and not lacking(source, target).any() and not lacking(target, source).any()


def _words(array: _CallArray, mesh: AnyMesh) -> str:
    """`as P(fsdp, -, -, -)`, with any difference in its devices or its mesh."""
    sharding = array.sharding
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return f"on {device_name(device)} alone"
    if not isinstance(sharding, NamedSharding):
        return f"split over {len(sharding.device_set)} devices"
    same_axes = dict(sharding.mesh.shape) == dict(mesh.shape)
    of = "" if same_axes else f" of mesh {describe_mesh(sharding.mesh)}"
    if array.elsewhere and isinstance(mesh, Mesh):
        inside = set(np.ravel(mesh.devices))
        common = len(inside & sharding.device_set)
        if common == len(inside) == len(sharding.device_set):
            of += " on the same devices in another order"
        else:
            of += f" on {len(sharding.device_set)} devices, {common} of them the mesh's {len(inside)}"
    return f"as {_text(sharding.spec, array)}{of}"


def _text(spec: PartitionSpec, array: _CallArray) -> str:
    return spec_text(PartitionSpec(*spec, *[None] * (len(array.shape) - len(spec))))


def _abstract(sharding: Sharding) -> bool:
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
