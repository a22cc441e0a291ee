"""What merging the outputs of shards with pages of the same sequences asks of the mesh."""

from __future__ import annotations

from ...errors import InputError
from ...planning.cache.cache_plan import CachePlan
from ...sharding import describe_mesh
from .state import CacheState

__all__ = ["check_mesh"]


def check_mesh(state: CacheState, plan: CachePlan) -> None:
    """Refuse a state whose sequence shards don't match the mesh. Errors: InputError."""
    if state.sequence_shards != plan.sequence_shards:
        raise InputError(
            f"the state has {state.sequence_shards} sequence shards, but on the mesh {describe_mesh(plan.mesh)} "
            f"page_sequence_axis makes {plan.sequence_shards}: make the state with init(cache, mesh) of this mesh."
        )
