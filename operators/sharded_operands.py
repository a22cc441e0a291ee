"""ShardedOperands: the arrays that are passed into shard_map."""

from __future__ import annotations

from typing import NamedTuple

import jax

__all__ = ["ShardedOperands"]


class ShardedOperands(NamedTuple):
    """In canonical form: query, key and value of rank 4, one sink per head, a scale for every key."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    softmax_aux: jax.Array | None
    query_offset: jax.Array | None
    dropout_seed: jax.Array | None
    leaves: tuple[jax.Array, ...]
    key_scale: jax.Array | None  # [batch, kv heads, kv], float32
    value_scale: jax.Array | None
