"""NamedShardings of a plan's arrays on a mesh, for jax.device_put and jax.jit."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import NamedSharding

from ..errors import ShardingError
from ..sharding import axes_of, current_mesh, describe_mesh
from ..sharding.mesh import AnyMesh
from .placement import Placement
from .problem import AttentionProblem

__all__ = ["named_shardings"]


def named_shardings(
    problem: AttentionProblem, placement: Placement, mesh: AnyMesh | None
) -> Mapping[str, NamedSharding]:
    """See Plan.named_shardings."""
    mesh = current_mesh() if mesh is None else mesh
    expected = [axis[:2] for axis in problem.mesh]
    if mesh is None or [axis[:2] for axis in axes_of(mesh)] != expected:
        raise ShardingError(
            f"this plan is for mesh {describe_mesh(problem.mesh)}, but the mesh given is {describe_mesh(mesh)}; give "
            "named_shardings(mesh) the mesh that the call will run on, or declare it."
            if expected
            else "this plan has no mesh, so it has no NamedShardings; declare one, as OperationMetadata(mesh=mesh)."
        )
    # The fitted shape of a tensor with repeated heads has more heads; the call's array isn't split there yet.
    shapes = {fitted.tensor: fitted.shape for fitted in placement.fitted.specs if fitted.tensor != "query3d"}
    names = (*(row.name for row in problem.required), "output")
    shapes |= {name: problem.shape_of(name) for name in names} | dict(problem.scales)
    return {name: NamedSharding(mesh, placement.call_spec(name, shape)) for name, shape in shapes.items()}
