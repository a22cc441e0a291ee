"""NamedShardings of what a plan places: on a mesh, as jax.device_put and jax.jit take them."""

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
    wanted = [axis[:2] for axis in problem.mesh]
    if mesh is None or [axis[:2] for axis in axes_of(mesh)] != wanted:
        raise ShardingError(
            f"this plan is for mesh {describe_mesh(problem.mesh)}, and the mesh to name is {describe_mesh(mesh)}; give "
            "named_shardings(mesh) the one that the call will run on, or declare it."
            if wanted
            else "this plan is for no mesh, so there is nothing to name; declare one, as OperationMetadata(mesh=mesh)."
        )
    # A tensor whose heads are repeated has more of them in its fitted shape; what comes isn't split there yet.
    shapes = {fitted.tensor: fitted.shape for fitted in placement.fitted.specs if fitted.tensor != "query3d"}
    shapes |= {name: problem.shape_of(name) for name in ("query", "key", "value", "output")} | dict(problem.scales)
    return {name: NamedSharding(mesh, placement.given(name, shape)) for name, shape in shapes.items()}
