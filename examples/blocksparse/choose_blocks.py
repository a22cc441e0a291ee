"""Top-k block selection: each block of queries chooses the blocks of keys that it attends to, while the program runs.

In the manner of MoBA (Lu et al., 2025) and of the selected branch of NSA (Yuan et al., 2025): each block of keys is represented
by its mean, a kv head's query heads choose together, and the block's own keys are always chosen.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attnops import Attention, Blocks, Causal

__all__ = ["ChosenAttention", "choose"]


def choose(query: jax.Array, key: jax.Array, block: int, count: int) -> jax.Array:
    """The row's own block, and the `count` best of those before it, -1 for none: int32 [batch, kv heads, blocks, count + 1].

    query [batch, time, heads, dim], key [batch, time, kv heads, dim]; time is a multiple of `block`. The first query of a block
    chooses for the whole block, so that nothing later influences the choice.
    """
    batch, time, kv_heads, dim = key.shape
    blocks = time // block
    means = key.reshape(batch, blocks, block, kv_heads, dim).mean(2)
    first = query[:, ::block].reshape(batch, blocks, kv_heads, -1, dim).mean(3)
    scores = jnp.einsum("bqhd,bkhd->bhqk", first, means)
    own = jnp.arange(blocks, dtype=jnp.int32)
    scores = jnp.where((own[:, None] > own[None])[None, None], scores, -jnp.inf)
    best, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), min(count, blocks))
    chosen = jnp.where(best > -jnp.inf, chosen, -1)
    own = jnp.broadcast_to(own[:, None], (*chosen.shape[:-1], 1))
    return jnp.concatenate([own, chosen], axis=-1)


class ChosenAttention:
    """Called like an Attention; calls one with the chosen blocks as its mask."""

    def __init__(self, attend: Attention, block: int, count: int) -> None:
        self.attend, self.block, self.count = attend, block, count

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, **call: Any) -> Any:
        """Only for train mode: a cache has its own blocks."""
        chosen = choose(query, key, self.block, self.count)
        return self.attend(query, key, value, mask=Causal() & Blocks(chosen, self.block, self.block), **call)
