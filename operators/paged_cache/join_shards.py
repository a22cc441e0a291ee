"""Merges the outputs of devices with pages of the same sequences by their log-sum-exps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...errors import InputError
from ...planning.cache.cache_plan import CachePlan
from ...sharding import describe_mesh
from ..kernels.lse import divisor, log_of_sum, shift_of
from .state import CacheState

__all__ = ["check_mesh", "joined_outputs", "joined_over_devices", "sinks_of"]


def joined_over_devices(
    output: Float[Array, "tokens heads value_dim"], lse: Float[Array, "tokens heads"], axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Inside a shard_map: (output, lse) of all keys, from each device's own. A row without visible keys is 0, its lse -inf."""
    shift = shift_of(lax.pmax(lse, axes))
    share = jnp.exp(lse - shift)
    weighted, total = lax.psum((output.astype(lse.dtype) * share[..., None], share), axes)
    return (weighted / divisor(total)[..., None]).astype(output.dtype), log_of_sum(total, shift)


def joined_outputs(
    output: Float[Array, "shards tokens heads value_dim"], lse: Float[Array, "shards tokens heads"]
) -> tuple[jax.Array, jax.Array]:
    """The same for arrays that hold all parts."""
    shift = shift_of(lse.max(axis=0))
    share = jnp.exp(lse - shift[None])
    total = share.sum(axis=0)
    weighted = (output.astype(lse.dtype) * share[..., None]).sum(axis=0)
    return (weighted / divisor(total)[..., None]).astype(output.dtype), log_of_sum(total, shift)


def sinks_of(sinks: jax.Array | None, index: Any) -> jax.Array | None:
    """A sink counts once: the first shard has the sinks, the others -inf, which weighs nothing."""
    return None if sinks is None else jnp.where(index == 0, sinks, -jnp.inf)


def check_mesh(state: CacheState, plan: CachePlan) -> None:
    """Refuse a state whose sequence shards don't match the mesh. Errors: InputError."""
    if state.sequence_shards != plan.sequence_shards:
        raise InputError(
            f"the state has {state.sequence_shards} sequence shards, but on the mesh {describe_mesh(plan.mesh)} "
            f"page_sequence_axis makes {plan.sequence_shards}: make the state with init(cache, mesh) of this mesh."
        )
