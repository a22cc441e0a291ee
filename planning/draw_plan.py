"""draw_plan: draw a plan's placement: each tensor over the mesh, device by device, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator

from ..drawing import DevicePicture, Transfer
from ..sharding.mesh import AnyMesh
from .draw_mesh import device_ids, groups_along, placed, sizes_of
from .moves import gathers, strategy_moves
from .placed_tensors import placed_tensors
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
    problem, placement = plan.problem, plan.placement
    of_strategy = strategy_moves(problem, placement, tuple(placed_tensors(problem, placement)))
    for move in (*gathers(problem, placement), *of_strategy):
        if groups := groups_along(problem.mesh, move.axes):
            yield Transfer(", ".join(move.tensors), move.kind, move.axes, groups, move.reason)
