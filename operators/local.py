"""What a forward method sees: one device's arrays, and everything static about the call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..masks import Full, Mask
from ..registry import AttentionProblem, OperationConfig, Placement

__all__ = ["Dropout", "LocalCall", "LocalMask", "LocalOutput"]


class LocalOutput(NamedTuple):
    """What a forward method returns: output in the call's layout, weights [b, h, q, kv], lse [b, h, q] in the softmax dtype."""

    output: jax.Array
    weights: jax.Array | None = None
    lse: jax.Array | None = None


@dataclass(frozen=True)
class LocalMask:
    """The mask of one shard. Rows are global: local row r is row `q_start + r` of the whole problem.

    `mask` holds the shard's own pieces of the traced arrays. `q_start` is traced when the queries are split.
    `query_offset` is an int, a traced [batch] array, or None when no part of the mask depends on positions.
    """

    mask: Mask
    q_start: int | jax.Array
    q_len: int
    kv_len: int
    query_offset: int | jax.Array | None

    def array(self) -> jax.Array | np.ndarray | None:
        """Return the mask as a boolean array that broadcasts to [batch, heads, q, kv], or None for full."""
        if isinstance(self.mask, Full):
            return None
        rows = (np.arange(self.q_len, dtype=np.int32) + self.q_start)[:, None]
        offset = 0 if self.query_offset is None else self.query_offset
        positions = rows + (offset if isinstance(offset, int) else offset[:, None, None, None])
        cols = np.arange(self.kv_len, dtype=np.int32)[None, :]
        visible = self.mask.test(rows, positions, cols)
        return visible if visible.ndim == 4 else visible[(None,) * (4 - visible.ndim)]


@dataclass(frozen=True)
class Dropout:
    """Dropout with one key a row of the whole problem, so that every mesh and every shard drops the same weights."""

    key_data: jax.Array
    impl: str
    probability: float
    batch_start: int | jax.Array
    head_start: int | jax.Array
    q_start: int | jax.Array

    def keep(self, batch: int, heads: int, q_len: int, kv_len: int) -> jax.Array:
        """Return True where a weight is kept: [batch, heads, q, kv]."""
        key = jax.random.wrap_key_data(self.key_data, impl=self.impl)
        starts = (self.batch_start, self.head_start, self.q_start)
        ids = [start + jnp.arange(n, dtype=jnp.uint32) for start, n in zip(starts, (batch, heads, q_len), strict=True)]

        def fold(keys: jax.Array, numbers: jax.Array) -> jax.Array:
            over_numbers = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
            return jax.vmap(over_numbers, in_axes=(0, None))(keys.reshape(-1), numbers)

        rows = functools.reduce(fold, ids, key[None]).reshape(-1)
        kept = jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - self.probability, (kv_len,)))(rows)
        return kept.reshape(batch, heads, q_len, kv_len)


@dataclass(frozen=True)
class LocalCall:
    """One device's part of a call. Arrays are in `layout` (bthd or bhtd) and in the run-time dtype."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None  # [heads], in the softmax dtype: several sinks of a head are already joined
    mask: LocalMask
    dropout: Dropout | None
    layout: str
    softmax_scale: float
    logits_soft_cap: float | None
    softmax_dtype: np.dtype
    return_weights: bool
    return_lse: bool
    config: OperationConfig
    problem: AttentionProblem
    placement: Placement
    # Index of this device's query shard among `q_shards`, traced when there are several.
    q_shard: int | jax.Array = 0
    q_shards: int = 1
