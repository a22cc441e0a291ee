"""What a forward method sees: one device's arrays, and everything static about the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from ...planning import AttentionProblem, OperationConfig, Placement, Route
from ...pytree_export import exported_tuple
from ...scores.steps import Steps
from ..kernels.dequantise import dequantised
from ..kernels.local_mask import Dropout, LocalMask

__all__ = ["LocalCall", "LocalOutput", "Ring"]


@exported_tuple
class LocalOutput(NamedTuple):
    """What a forward method returns: output in the call's layout, weights [b, h, q, kv], lse [b, h, q] in the softmax dtype."""

    output: jax.Array
    weights: jax.Array | None = None
    lse: jax.Array | None = None


@dataclass(frozen=True)
class Ring:
    """axis: the mesh axes that split the sequence, as one. steps: how many shards the keys have moved at each step in which any
    device has visible keys; the first is 0. scan: one compiled step for all, else one for each. zigzag: this device's
    rows and keys are the k-th of 2 * size chunks and the k-th from the end; otherwise they are the k-th of size.
    full_chunk_pairs: with zigzag, a chunk of the rows sees all of each earlier chunk of the keys, so that no mask is needed.
    """

    axes: tuple[str, ...]
    size: int
    steps: tuple[int, ...]
    scan: bool
    zigzag: bool = False
    full_chunk_pairs: bool = False

    @property
    def chunks(self) -> int:
        """How many chunks of the sequence a device's rows and keys form."""
        return 2 if self.zigzag else 1


@dataclass(frozen=True)
class LocalCall:
    """One device's part of a call. Arrays are in `layout` (bthd or bhtd) and in the run-time dtype.

    A quantised key or value is unchanged; the attention uses it times its scale. A method that doesn't do that
    itself works on `dequantised()`. Where values are a part of their keys, `value` is an array of these columns: a kernel that
    reads them where they are, as `problem.value_columns` says, leaves it alone, and it is never made.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None  # [heads], in the softmax dtype: several sinks of a head are already merged
    mask: LocalMask
    dropout: Dropout | None
    layout: str
    softmax_scale: float
    logits_soft_cap: float | None
    softmax_dtype: np.dtype
    return_weights: bool
    return_lse: bool
    config: OperationConfig
    route: Route | None
    problem: AttentionProblem
    placement: Placement
    # Index of this device's query shard among `q_shards`, traced when there are several.
    q_shard: int | jax.Array = 0
    q_shards: int = 1
    # How keys arrive from other devices; None if this device has them all.
    ring: Ring | None = None
    # [batch, kv heads, kv] in float32; None where key or value isn't quantised, or is used unscaled.
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    # The steps of the call's score, after the soft cap, and the arrays that they read.
    score: Steps | None = None
    captures: tuple[jax.Array, ...] = ()
    # An operation's own operands by name, in the kernel's layout: this device's part.
    further: Mapping[str, jax.Array] = field(default_factory=dict)

    def dequantised(self) -> LocalCall:
        """The call with key and value in the run-time dtype and without scales; itself if nothing is quantised.

        Hidden keys are zeros: the gradient of a scale multiplies by what it scales.
        """
        if not self.problem.quantised:
            return self
        clean = self.with_hidden_keys_zero()
        key, value = (
            dequantised(x, scale, self.layout, self.query.dtype)
            for x, scale in ((clean.key, clean.key_scale), (clean.value, clean.value_scale))
        )
        return replace(self, key=key, value=value, key_scale=None, value_scale=None)

    def with_hidden_keys_zero(self) -> LocalCall:
        """The call with zeros in place of the keys, values and scales that no query sees.

        For methods that don't do this themselves. Not for a ring, where the keys go on to other devices' queries.
        """
        from ..kernels.seen_keys import seen_keys, zero_where_hidden  # kernels are imported when one runs

        assert self.ring is None
        tensors = self.key, self.value, self.key_scale, self.value_scale
        visible = seen_keys(self.mask, self.key.shape[self.layout.index("h")], tensors)
        if visible is None:
            return self
        key, value, key_scale, value_scale = (
            x if x is None else zero_where_hidden(x, visible, self.layout) for x in tensors
        )
        assert key is not None
        assert value is not None
        if self.problem.value_columns is not None:
            value = key[..., : self.problem.value_columns]
        return replace(self, key=key, value=value, key_scale=key_scale, value_scale=value_scale)
