"""What the splash kernels of jax and tokamax need around them to match the reference.

Their own mask objects are evaluated block by block on the host: minutes for 128k tokens. The kernels themselves need only
small tables (which blocks are live, in which order) and a function of (query, key) indices. Both follow from the mask's closed
form in milliseconds, so they are built here and in the two adapters, and passed to the kernels directly.

Three things are added:
- the kernels apply no softmax scale: the query is scaled first;
- a fully masked row would give the mean of the values: a sink at -1e30 takes such a row's whole weight (output 0, and
  gradient 0) and is negligible next to any real logit;
- lengths must be multiples of the blocks: q, k, v are padded here and padded keys are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ....masks import And, Full, Mask, Prefix
from ...kernels.default_promotion import default_promotion
from ...kernels.derivatives import once_in_reverse

__all__ = [
    "ExternalCall",
    "ExternalOperands",
    "MaskInKernel",
    "block_kinds",
    "small",
    "under_defaults",
]

# Far below every logit, far above the kernels' own mask value (-2.4e38): exp(real - sink) and exp(mask - sink) are exact.
_NO_SINK = -1e30


@dataclass(frozen=True)
class MaskInKernel:
    """The mask as a function of global query rows and key columns; hashable, so that jit caches by it.

    A row of -1 is padding and sees nothing, in every pass. Passes with different blocks visit different padded rows; one
    that saw keys only in the backward pass would meet an empty log-sum-exp there, and give NaN.
    """

    mask: Mask

    def __call__(self, rows: Array, cols: Array) -> Array:
        return self.mask.test(rows, rows, cols) & (rows >= 0)


class ExternalOperands(NamedTuple):
    """A call's padded arrays and its mask, prepared for a kernel.

    `function` is the mask in the kernel, None where nothing is masked; then `rows` holds the global number of each query row.
    """

    query: Array
    key: Array
    value: Array
    segments: tuple[Array, Array] | None
    sinks: Array | None
    mask: Mask
    function: MaskInKernel | None
    rows: Array | None

    def attend(self, kernel: Callable[..., Any], q_len: int) -> Array:
        """Run a kernel of (q, k, v, segment ids, sinks) without a batch over the batch; returns the rows without padding."""
        sinks = None if self.sinks is None else _float32_gradient(self.sinks)
        run = jax.vmap(kernel, in_axes=(0, 0, 0, None if self.segments is None else 0, None))
        output: Array = run(self.query, self.key, self.value, self.segments, sinks)
        return output[:, :, :q_len]


class ExternalCall(NamedTuple):
    """One device's call. Arrays are [batch, heads, length, dim].

    `mask` is static with every offset declared. The queries are shard `shard` of `shards` equal parts of the whole
    sequence; row r of the shard is global row shard * q + r.
    """

    query: Float[Array, "batch heads q dim"]
    key: Float[Array, "batch kv_heads kv dim"]
    value: Float[Array, "batch kv_heads kv value_dim"]
    mask: Mask
    scale: float
    soft_cap: float | None
    sinks: Float[Array, " heads"] | None
    q_segment_ids: Int[Array, "batch q"] | None
    kv_segment_ids: Int[Array, "batch kv"] | None
    kv_lengths: Int[Array, " batch"] | None
    may_have_dead_rows: bool
    shard: int | Array
    shards: int

    def operands(self, q_padded: int, kv_padded: int) -> ExternalOperands:
        """Scale, pad, and merge everything that masks."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        query = _pad((self.query * jnp.asarray(self.scale, jnp.float32)).astype(self.query.dtype), q_padded)
        mask = self.mask if kv_padded == kv_len else And((*self.mask.conjuncts(), Prefix(kv_len)))
        sinks = self.sinks
        if sinks is not None:
            sinks = jnp.maximum(sinks, _NO_SINK)
        elif self.may_have_dead_rows or q_padded > q_len:
            sinks = jnp.full((query.shape[1],), _NO_SINK, jnp.float32)
        function = None if isinstance(mask, Full) else MaskInKernel(mask)
        local = jnp.arange(q_padded, dtype=jnp.int32)
        rows = None if function is None else jnp.where(local < q_len, self.shard * q_len + local, -1)
        segments = self._segments(q_padded, kv_padded)
        return ExternalOperands(
            query, _pad(self.key, kv_padded), _pad(self.value, kv_padded), segments, sinks, mask, function, rows
        )

    def _segments(self, q_padded: int, kv_padded: int) -> tuple[Array, Array] | None:
        """Merge segment ids and lengths into segment ids: a key beyond its row's length gets an id that no query has."""
        q_ids, kv_ids, kv_lengths = self.q_segment_ids, self.kv_segment_ids, self.kv_lengths
        if q_ids is None and kv_lengths is None:
            return None
        batch, kv_len = self.query.shape[0], self.key.shape[2]
        q = jnp.zeros((batch, self.query.shape[2]), jnp.int32) if q_ids is None else q_ids.astype(jnp.int32)
        kv = jnp.zeros((batch, kv_len), jnp.int32) if kv_ids is None else kv_ids.astype(jnp.int32)
        if kv_lengths is not None:
            low, high = q.min(axis=1, keepdims=True), q.max(axis=1, keepdims=True)
            nobody = jnp.where(low > jnp.iinfo(jnp.int32).min, low - 1, high + 1)
            kv = jnp.where(jnp.arange(kv_len, dtype=jnp.int32)[None] < kv_lengths[:, None], kv, nobody)
        pad = lambda x, n: jnp.pad(x, ((0, 0), (0, n - x.shape[1])))  # noqa: E731 - padded keys are masked by Prefix
        return pad(q, q_padded), pad(kv, kv_padded)


def under_defaults(attend: Callable[[ExternalCall], Array], call: ExternalCall, kernel: str) -> Array:
    """Run a kernel, forward and backward, as if jax's options had their defaults.

    With jax_enable_x64 Python numbers would be 64-bit, which Mosaic lacks; strict promotion is for the caller's code.
    """
    arrays = {name: x for name, x in call._asdict().items() if isinstance(x, jax.Array)}
    what = f"{kernel}'s splash kernel"
    output: Array = once_in_reverse(lambda replaced: attend(call._replace(**replaced)), arrays, what, within=_defaults)
    return output


@contextmanager
def _defaults() -> Iterator[None]:
    with jax.enable_x64(False), default_promotion():
        yield


@jax.custom_vjp
def _float32_gradient(sinks: Array) -> Array:
    # The kernels' gradient of float32 sinks has the query's dtype; what produced the sinks requires its own.
    return sinks


def _float32_gradient_fwd(sinks: Array) -> tuple[Array, None]:
    return sinks, None


def _float32_gradient_bwd(_: None, d_sinks: Array) -> tuple[Array]:
    return (d_sinks.astype(jnp.float32),)


_float32_gradient.defvjp(_float32_gradient_fwd, _float32_gradient_bwd)


def _pad(x: Array, length: int) -> Array:
    missing = length - x.shape[2]
    return x if not missing else jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))


def block_kinds(
    mask: Mask, q_len: int, kv_len: int, q_padded: int, kv_padded: int, shards: int, block_q: int, block_kv: int
) -> np.ndarray:
    """0 empty, 1 partial, 2 full: int8 [shards, q blocks, kv blocks]. A block with padding in it is never full."""
    q_blocks, kv_blocks = q_padded // block_q, kv_padded // block_kv
    kinds = np.zeros((shards, q_blocks, kv_blocks), np.int8)
    for shard in range(shards):
        device_kinds = mask.live_blocks(block_q, block_kv, q_len=q_len, kv_len=kv_len, q_start=shard * q_len)
        kinds[shard, : device_kinds.shape[0], : device_kinds.shape[1]] = device_kinds
    for whole, axis in ((q_len // block_q, 1), (kv_len // block_kv, 2)):
        edge = kinds[:, whole:] if axis == 1 else kinds[:, :, whole:]
        np.minimum(edge, 1, out=edge)
    return kinds


def small(index: np.ndarray, bound: int) -> np.ndarray:
    """The index in the smallest type that holds `bound`: the tables are in scalar memory, which is small."""
    return index.astype(np.int8 if bound <= 127 else np.int16 if bound <= 32767 else np.int32)
