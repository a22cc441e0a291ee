"""jax's Pallas TPU splash kernel on raw arrays, with symbolic masks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jaxtyping import Array, Float

from ....masks import Full, Mask
from .external_splash import ExternalCall, block_kinds, small
from .splash_blocks import ExternalBlocks

__all__ = ["jax_splash_attention"]

_LAYOUTS = {"head_dim_minor": splash.QKVLayout.HEAD_DIM_MINOR, "seq_minor": splash.QKVLayout.SEQ_MINOR}


def jax_splash_attention(
    call: ExternalCall, blocks: ExternalBlocks, *, residual_checkpoint_name: str | None, interpret: bool
) -> Float[Array, "batch heads q value_dim"]:
    """Attend with jax's kernel, forward and gradient."""
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    padded = blocks.padded(q_len, kv_len)
    arguments = call.operands(*padded)
    tables = functools.partial(_tables, arguments.mask, q_len, kv_len, *padded, call.shards)
    by_query = [tables(*block[:2], "forward") for block in (blocks.forward, blocks.dq) if block is not None]
    by_key = tables(*blocks.dkv[:2], "whole" if blocks.dq is None else "backward")
    forward, *dq = (_info(t, arguments.rows, call) for t in by_query)
    kernel = splash.SplashAttentionKernel(
        forward,
        dq[0] if dq else None,
        _info(by_key, arguments.rows, call),
        block_sizes=_sizes(blocks),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=call.soft_cap,
        residual_checkpoint_name=residual_checkpoint_name,
        mask_function=arguments.function,
        interpret=interpret,
    )
    return arguments.attend(lambda q, k, v, ids, sinks: kernel(q, k, v, ids and splash.SegmentIds(*ids), sinks), q_len)


def _sizes(blocks: ExternalBlocks) -> splash.BlockSizes:
    return splash.BlockSizes(
        **blocks.keywords(),
        block_q_dq=None if blocks.dq is None else blocks.dq.block_q,
        block_kv_dq=None if blocks.dq is None else blocks.dq.block_kv,
        use_fused_bwd_kernel=blocks.dq is None,
        q_layout=_LAYOUTS[blocks.q_layout],
        k_layout=_LAYOUTS[blocks.k_layout],
        v_layout=_LAYOUTS[blocks.v_layout],
    )


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
    visible = block_kinds(mask, q_len, kv_len, q_padded, kv_padded, shards, block_q, block_kv) > 0
    q_blocks, kv_blocks = visible.shape[1:]
    if grid == "whole":
        index = np.broadcast_to(np.arange(q_blocks)[None, :, None], visible.shape)
        return small(index, q_blocks), visible.astype(np.int8)
    if grid == "backward":
        index, used = _shrink(visible.swapaxes(1, 2)[..., ::-1])
        index = np.where(used, q_blocks - 1 - index, 0)[..., ::-1].swapaxes(1, 2)
        return small(index, q_blocks), used[..., ::-1].swapaxes(1, 2).astype(np.int8)
    index, used = _shrink(visible)
    return small(index, kv_blocks), used.astype(np.int8)


def _shrink(visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move the live columns of each row to the front, in order, and cut to the longest row (at least one column).

    The rest of a row repeats its last live index, because an index that doesn't change fetches nothing.
    """
    counts = visible.sum(axis=-1, keepdims=True)
    width = max(1, int(counts.max()))
    order = np.argsort(~visible, axis=-1, kind="stable")
    place = np.arange(width)
    index = np.take_along_axis(order, np.minimum(place, np.maximum(counts - 1, 0)), axis=-1)
    return index, place < counts


def _info(tables: tuple[np.ndarray, np.ndarray] | None, rows: Array | None, call: ExternalCall) -> mask_info.MaskInfo:
    if tables is None:
        return mask_info.MaskInfo(None, None, None, None, None)
    index, visible = (jnp.asarray(t) for t in tables)
    if call.shards > 1:
        index, visible = (jax.lax.dynamic_slice_in_dim(t, call.shard, 1) for t in (index, visible))
    return mask_info.MaskInfo(index, None, visible, None, rows)  # type: ignore[arg-type]  # jax says NumPy only
