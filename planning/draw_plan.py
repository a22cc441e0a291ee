"""draw_plan: draw a plan's placement: each tensor over the mesh, device by device, and what is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from ..drawing import DevicePicture, Placed, Sent, Split
from ..errors import ShardingError
from ..sharding import FittedSpec, axes_of, describe_mesh
from ..sharding.mesh import AnyMesh
from ..sharding.rules import tensor_dims
from .plan_fields import PlanFields
from .repeated import repeated_lines
from .text import spec_text

__all__ = ["draw_plan"]


class _Way(NamedTuple):
    """How a tensor is placed."""

    dims: tuple[Split, ...]
    drops: tuple[tuple[str, str, str], ...]
    spec: str


def draw_plan(plan: PlanFields, mesh: AnyMesh | None) -> DevicePicture:
    """See Plan.draw."""
    problem = plan.problem
    mesh = plan.mesh if mesh is None else mesh
    if mesh is not None and [axis[:2] for axis in axes_of(mesh)] != [axis[:2] for axis in problem.mesh]:
        raise ShardingError(
            f"this plan is for mesh {describe_mesh(problem.mesh)}, but the mesh to draw is {describe_mesh(mesh)}; give "
            "draw(mesh) the mesh that the call will run on, or leave it out."
        )
    axes = tuple((axis.name, axis.size) for axis in problem.mesh)
    count = math.prod(size for _, size in axes)
    ids = tuple(d.id for d in mesh.devices.flat) if isinstance(mesh, Mesh) else tuple(range(count))
    return DevicePicture(
        problem.describe(), axes, ids, tuple(_tensors(plan)), tuple(_sent(plan)), tuple(_repeated(plan))
    )


def _repeated(plan: PlanFields) -> Iterator[str]:
    """Lines for repeated heads, and for axes over which work is repeated."""
    if (times := plan.placement.kv_repeat) > 1:
        yield f"each kv head is repeated {times} times, so that devices get whole heads"
    yield from repeated_lines(plan.placement.repeated)


def _coordinates(plan: PlanFields) -> list[dict[str, int]]:
    """The coordinate of each device along each axis, in the mesh's order."""
    sizes = [axis.size for axis in plan.problem.mesh]
    names = [axis.name for axis in plan.problem.mesh]
    found = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=-1) if sizes else np.zeros((1, 0), int)
    return [dict(zip(names, map(int, row), strict=True)) for row in found]


def _tensors(plan: PlanFields) -> Iterator[Placed]:
    """The tensors of the call. Tensors with the same placement and the same dimension names are drawn as one."""
    alike: dict[_Way, list[FittedSpec]] = {}
    for fitted in plan.placement.fitted.specs:
        if fitted.tensor != "query3d":
            drops = tuple((d.axis, d.dim, d.reason) for d in fitted.dropped if not d.harmless)
            alike.setdefault(_Way(_dims(plan, fitted), drops, spec_text(fitted.spec)), []).append(fitted)
    where = _coordinates(plan)
    for way, found in alike.items():
        held = tuple(tuple(_part(dim, at, plan) for dim in way.dims) for at in where)
        yield Placed(tuple(f.tensor for f in found), way.spec, _shape(found[0]), way.dims, held, way.drops)


def _dims(plan: PlanFields, fitted: FittedSpec) -> tuple[Split, ...]:
    layout = plan.problem.layout
    tensor = fitted.tensor.removesuffix("_scale")
    names = tensor_dims(tensor, layout, aux_ndim=len(fitted.shape))
    sizes = {axis.name: axis.size for axis in plan.problem.mesh}
    found = []
    for index, (size, local) in enumerate(zip(fitted.shape, fitted.local_shape, strict=True)):
        name = names[index] if index < len(names) else ""
        axes = tuple(axis for axis in fitted.axes(index) if sizes[axis] > 1)
        found.append(Split(name, size, axes, size // local if local else 1))
    return tuple(found)


def _part(dim: Split, at: dict[str, int], plan: PlanFields) -> int:
    """The part of a dimension that a device holds; the first axis of the spec's entry is the most significant."""
    if dim.parts == 1:
        return 0
    sizes = {axis.name: axis.size for axis in plan.problem.mesh}
    part = 0
    for axis in dim.axes:
        part = part * sizes[axis] + at[axis]
    return part


def _sent(plan: PlanFields) -> Iterator[Sent]:
    """What the forward pass sends between devices, according to the placement."""
    placement, problem = plan.placement, plan.problem
    split, query, key = placement.sequence, placement.fitted["query"], placement.fitted["key"]
    t, d = (problem.layout.index(axis) for axis in "td")
    moved = ", ".join(("key", "value", *problem.scales))

    def sent(what: str, kind: str, axes: tuple[str, ...], why: str) -> Iterator[Sent]:
        if groups := _groups(plan, axes):
            yield Sent(what, kind, axes, groups, why)

    yield from sent("query", "all-gather", query.axes(d), "each head is processed whole")
    yield from sent(moved, "all-gather", key.axes(d), "each head is processed whole")
    if split.strategy in ("", "gather"):
        yield from sent(moved, "all-gather", key.axes(t), "a query sees every key")
    yield from sent("query", "all-gather", split.gathered_queries, "every query attends to each part of the keys")
    yield from sent("query, key, value", "all-to-all", split.head_axes, "heads are split instead of the sequence")
    reordered = split.ring_axes if split.zigzag else ()
    yield from sent("query, key, value", "permute", reordered, "into zigzag order")
    steps = f"{len(split.steps) - 1} of {split.ring_size - 1} steps" if split.ring_axes else ""
    yield from sent("key, value", "ring", split.ring_axes, f"in {steps}")
    yield from sent("output", "permute", reordered, "back into order")
    if split.strategy == "split_kv":
        yield from sent("output, lse", "all-reduce", split.axes, "outputs over parts of the keys are merged")
    yield from sent("output", "all-to-all", split.head_axes, "the sequence is split again")


def _groups(plan: PlanFields, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that differ only along these axes; () if the axes have one device."""
    names = [axis.name for axis in plan.problem.mesh]
    sizes = [axis.size for axis in plan.problem.mesh]
    along = [names.index(axis) for axis in axes]
    if math.prod(sizes[i] for i in along) == 1:
        return ()
    others = [i for i in range(len(names)) if i not in along]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose(*others, *along)
    return tuple(tuple(map(int, group)) for group in places.reshape(-1, math.prod(sizes[i] for i in along)))


def _shape(fitted: FittedSpec) -> str:
    return f"{'x'.join(map(str, fitted.shape))} -> {'x'.join(map(str, fitted.local_shape))}"
