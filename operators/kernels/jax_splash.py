"""jax's Pallas TPU splash kernel on raw arrays, with symbolic masks.

jax's own make_splash_* evaluates the mask block by block on the host: 30 s for a causal 128k x 128k. The kernel itself
wants only small tables (which kv block comes next, which blocks are live) and a function of (query, key) indices. Both
follow from the mask's closed form in milliseconds, so they are built here and handed to SplashAttentionKernel directly.

Three things are added around the kernel so that it means what the reference means:
- it applies no softmax scale: the query is scaled first;
- a fully masked row gives the mean of the values there: a sink at -1e30 takes such a row's whole weight (output 0, and
  gradient 0) and is nothing beside any real logit;
- lengths must be multiples of the blocks: q, k, v are padded here and padded keys are masked.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jaxtyping import Array, Float, Int

from ...masks import And, Full, Mask, Prefix

__all__ = ["JaxSplashBlocks", "jax_splash_attention"]

# Far below every logit, far above the kernel's own mask value (-2.4e38): exp(real - sink) and exp(mask - sink) are exact.
_NO_SINK = -1e30
_LAYOUTS = {"head_dim_minor": splash.QKVLayout.HEAD_DIM_MINOR, "seq_minor": splash.QKVLayout.SEQ_MINOR}


@dataclass(frozen=True)
class JaxSplashBlocks:
    """Block sizes and layouts, all resolved. `block_q_dq` and `block_kv_dq` are None with the fused backward."""

    block_q: int
    block_kv: int
    block_kv_compute: int
    block_q_dkv: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    block_q_dq: int | None
    block_kv_dq: int | None
    use_fused_bwd_kernel: bool
    q_layout: str
    k_layout: str
    v_layout: str

    def padded(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """The lengths as the kernel needs them: multiples of every block in use."""
        q_block = math.lcm(self.block_q, self.block_q_dkv, self.block_q_dq or 1)
        kv_block = math.lcm(self.block_kv, self.block_kv_dkv, self.block_kv_dq or 1)
        return -(-q_len // q_block) * q_block, -(-kv_len // kv_block) * kv_block

    def kernel(self) -> splash.BlockSizes:
        """The same as jax's BlockSizes."""
        return splash.BlockSizes(
            block_q=self.block_q,
            block_kv=self.block_kv,
            block_kv_compute=self.block_kv_compute,
            block_q_dkv=self.block_q_dkv,
            block_kv_dkv=self.block_kv_dkv,
            block_kv_dkv_compute=self.block_kv_dkv_compute,
            block_q_dq=self.block_q_dq,
            block_kv_dq=self.block_kv_dq,
            use_fused_bwd_kernel=self.use_fused_bwd_kernel,
            q_layout=_LAYOUTS[self.q_layout],
            k_layout=_LAYOUTS[self.k_layout],
            v_layout=_LAYOUTS[self.v_layout],
        )


@dataclass(frozen=True)
class _MaskInKernel:
    """The mask as a function of global query rows and key columns; hashable, so that jit caches by it.

    A row of -1 is padding and sees nothing, in every pass. Passes with different blocks visit different padded rows; one
    that saw keys in the backward pass alone would meet a log-sum-exp of nothing there, and give NaN.
    """

    mask: Mask
    version: int  # a mask's hash, unlike its equality, knows when a registered mask function was replaced

    def __call__(self, rows: Array, cols: Array) -> Array:
        return self.mask.test(rows, rows, cols) & (rows >= 0)


def jax_splash_attention(
    query: Float[Array, "batch heads q dim"],
    key: Float[Array, "batch kv_heads kv dim"],
    value: Float[Array, "batch kv_heads kv value_dim"],
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_segment_ids: Int[Array, "batch q"] | None,
    kv_segment_ids: Int[Array, "batch kv"] | None,
    kv_lengths: Int[Array, " batch"] | None,
    may_have_dead_rows: bool,
    blocks: JaxSplashBlocks,
    shard: int | Array,
    shards: int,
    residual_checkpoint_name: str | None,
    interpret: bool,
) -> Float[Array, "batch heads q value_dim"]:
    """Attend with the splash kernel.

    `mask` is static with every offset declared. The queries are shard `shard` of `shards` equal parts of the whole
    sequence; row r of the shard is global row shard * q + r. Forward and gradient.
    """
    q_len, kv_len, heads = query.shape[2], key.shape[2], query.shape[1]
    q_padded, kv_padded = blocks.padded(q_len, kv_len)
    query = _pad((query * jnp.asarray(scale, jnp.float32)).astype(query.dtype), q_padded)
    key, value = _pad(key, kv_padded), _pad(value, kv_padded)
    segments = _segments(q_segment_ids, kv_segment_ids, kv_lengths, query.shape[0], q_len, q_padded, kv_len, kv_padded)
    if kv_padded > kv_len:
        mask = And((*mask.conjuncts(), Prefix(kv_len)))
    if sinks is not None:
        sinks = jnp.maximum(sinks, _NO_SINK)
    elif may_have_dead_rows or q_padded > q_len:
        sinks = jnp.full((heads,), _NO_SINK, jnp.float32)

    tables = functools.partial(_tables, mask, q_len, kv_len, q_padded, kv_padded, shards)
    function = None if isinstance(mask, Full) else _MaskInKernel(mask, hash(mask))
    local = jnp.arange(q_padded, dtype=jnp.int32)
    rows = None if function is None else jnp.where(local < q_len, shard * q_len + local, -1)
    by_query = [tables(blocks.block_q, blocks.block_kv, "forward")]
    if not blocks.use_fused_bwd_kernel:
        by_query.append(tables(blocks.block_q_dq or 0, blocks.block_kv_dq or 0, "forward"))
    by_key = tables(blocks.block_q_dkv, blocks.block_kv_dkv, "whole" if blocks.use_fused_bwd_kernel else "backward")
    forward, *dq = (_info(t, rows, shard, shards) for t in by_query)
    kernel = splash.SplashAttentionKernel(
        forward,
        dq[0] if dq else None,
        _info(by_key, rows, shard, shards),
        block_sizes=blocks.kernel(),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=residual_checkpoint_name,
        mask_function=function,
        interpret=interpret,
    )
    sinks = None if sinks is None else _float32_gradient(sinks)
    run = jax.vmap(kernel, in_axes=(0, 0, 0, None if segments is None else 0, None))
    output = run(query, key, value, segments, sinks)
    assert isinstance(output, jax.Array)  # a pair with save_residuals=True
    return output[:, :, :q_len]


@jax.custom_vjp
def _float32_gradient(sinks: Array) -> Array:
    # The kernel's gradient of float32 sinks comes in the query's dtype; what produced the sinks needs its own.
    return sinks


def _float32_gradient_fwd(sinks: Array) -> tuple[Array, None]:
    return sinks, None


def _float32_gradient_bwd(_: None, d_sinks: Array) -> tuple[Array]:
    return (d_sinks.astype(jnp.float32),)


_float32_gradient.defvjp(_float32_gradient_fwd, _float32_gradient_bwd)


def _pad(x: Array, length: int) -> Array:
    missing = length - x.shape[2]
    return x if not missing else jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))


def _segments(
    q_ids: Array | None, kv_ids: Array | None, kv_lengths: Array | None, batch: int, q_len: int, q_padded: int,
    kv_len: int, kv_padded: int,
) -> splash.SegmentIds | None:  # fmt: skip
    """Join segment ids and lengths into segment ids: a key beyond its row's length gets an id that no query has."""
    if q_ids is None and kv_lengths is None:
        return None
    q = jnp.zeros((batch, q_len), jnp.int32) if q_ids is None else q_ids.astype(jnp.int32)
    kv = jnp.zeros((batch, kv_len), jnp.int32) if kv_ids is None else kv_ids.astype(jnp.int32)
    if kv_lengths is not None:
        low, high = q.min(axis=1, keepdims=True), q.max(axis=1, keepdims=True)
        nobody = jnp.where(low > jnp.iinfo(jnp.int32).min, low - 1, high + 1)
        kv = jnp.where(jnp.arange(kv_len) < kv_lengths[:, None], kv, nobody)
    pad = lambda x, n: jnp.pad(x, ((0, 0), (0, n - x.shape[1])))  # noqa: E731 - padded keys are masked by Prefix
    return splash.SegmentIds(pad(q, q_padded), pad(kv, kv_padded))


@functools.lru_cache(maxsize=256)
def _tables(
    mask: Mask,
    q_len: int,
    kv_len: int,
    q_padded: int,
    kv_padded: int,
    shards: int,
    block_q: int,
    block_kv: int,
    grid: str,
) -> tuple[np.ndarray, np.ndarray] | None:
    """(block index to fetch, live) for every shard: int [shards, q blocks, kv blocks], or None if all blocks are full.

    `grid` is 'forward' (kv blocks shrunk to the live ones of each row), 'backward' (q blocks shrunk to the live ones of
    each column, padding first) or 'whole' (no shrinking; index of the q block).
    """
    if isinstance(mask, Full):
        return None
    q_blocks, kv_blocks = q_padded // block_q, kv_padded // block_kv
    live = np.zeros((shards, q_blocks, kv_blocks), bool)
    for shard in range(shards):
        found = mask.live_blocks(block_q, block_kv, q_len=q_len, kv_len=kv_len, q_start=shard * q_len) > 0
        live[shard, : found.shape[0], : found.shape[1]] = found
    if grid == "whole":
        index = np.broadcast_to(np.arange(q_blocks)[None, :, None], live.shape)
        return _small(index, q_blocks), live.astype(np.int8)
    if grid == "backward":
        index, kept = _shrink(live.swapaxes(1, 2)[..., ::-1])
        index = np.where(kept, q_blocks - 1 - index, 0)[..., ::-1].swapaxes(1, 2)
        return _small(index, q_blocks), kept[..., ::-1].swapaxes(1, 2).astype(np.int8)
    index, kept = _shrink(live)
    return _small(index, kv_blocks), kept.astype(np.int8)


def _shrink(live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move the live columns of each row to the front, in order, and cut to the longest row (at least one column).

    The rest of a row repeats its last live index: an index that doesn't change fetches nothing.
    """
    counts = live.sum(axis=-1, keepdims=True)
    width = max(1, int(counts.max()))
    order = np.argsort(~live, axis=-1, kind="stable")
    place = np.arange(width)
    index = np.take_along_axis(order, np.minimum(place, np.maximum(counts - 1, 0)), axis=-1)
    return index, place < counts


def _small(index: np.ndarray, bound: int) -> np.ndarray:
    # The tables live in scalar memory, of which there is little.
    return index.astype(np.int8 if bound <= 127 else np.int16 if bound <= 32767 else np.int32)


def _info(
    tables: tuple[np.ndarray, np.ndarray] | None, rows: Array | None, shard: int | Array, shards: int
) -> mask_info.MaskInfo:
    if tables is None:
        return mask_info.MaskInfo(None, None, None, None, None)
    index, live = (jnp.asarray(t) for t in tables)
    if shards > 1:
        index, live = (jax.lax.dynamic_slice_in_dim(t, shard, 1) for t in (index, live))
    return mask_info.MaskInfo(index, None, live, None, rows)  # type: ignore[arg-type]  # jax says NumPy only
