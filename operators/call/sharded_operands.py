"""ShardedOperands: the arrays that are passed into shard_map."""

from __future__ import annotations

from typing import NamedTuple

import jax

__all__ = ["ShardedOperands"]


class ShardedOperands(NamedTuple):
    """operands: by name, in the form that they have inside: query, key and value of rank 4, one sink per head, a float32 scale
    for every key, [batch, kv heads, kv]. leaves: the mask's arrays."""

    operands: dict[str, jax.Array]
    leaves: tuple[jax.Array, ...]
    query_offset: jax.Array | None
    dropout_seed: jax.Array | None
