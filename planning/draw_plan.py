"""draw_plan: draw a plan's placement: each tensor over the mesh, device by device, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator

from ..drawing import DevicePicture, Transfer
from ..sharding.mesh import AnyMesh
from .draw_mesh import device_ids, groups_along, placed, sizes_of
from .plan_fields import PlanFields
from .repeated import repeated_lines

__all__ = ["draw_plan"]


def draw_plan(plan: PlanFields, mesh: AnyMesh | None) -> DevicePicture:
    """See Plan.draw."""
    axes = plan.problem.mesh
    tensors = ((fitted.tensor, fitted) for fitted in plan.placement.fitted.specs if fitted.tensor != "query3d")
    ids = device_ids(axes, plan.mesh if mesh is None else mesh)
    return DevicePicture(
        plan.problem.describe(),
        sizes_of(axes),
        ids,
        tuple(placed(tensors, axes)),
        tuple(_sent(plan)),
        tuple(_repeated(plan)),
    )


def _repeated(plan: PlanFields) -> Iterator[str]:
    """Lines for repeated heads, and for axes over which work is repeated."""
    if (times := plan.placement.kv_repeat) > 1:
        yield f"each kv head is repeated {times} times, so that devices get whole heads"
    yield from repeated_lines(plan.placement.repeated)


def _sent(plan: PlanFields) -> Iterator[Transfer]:
    """What the forward pass sends between devices, according to the placement."""
    placement, problem = plan.placement, plan.problem
    split, query, key = placement.sequence, placement.fitted["query"], placement.fitted["key"]
    t, d = (problem.layout.index(axis) for axis in "td")
    moved = ", ".join(("key", "value", *problem.scales))

    def sent(what: str, kind: str, axes: tuple[str, ...], why: str) -> Iterator[Transfer]:
        if groups := groups_along(problem.mesh, axes):
            yield Transfer(what, kind, axes, groups, why)

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
