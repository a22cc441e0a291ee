"""tokamax's Pallas TPU splash kernel on raw arrays, with symbolic masks.

The kernel's module is private to tokamax. tokamax's public interface (`tokamax.ops.experimental.tpu.SplashAttention`, in
versions that require Python 3.12) takes neither the backward's blocks nor fuse_reciprocal, a residual's name or interpret, and
makes a [q, kv] array of every mask except full and causal. So this uses the private module; TRIED lists the versions tested.
"""

from __future__ import annotations

import functools
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ....masks import Full, Mask
from .external_splash import ExternalCall, ExternalOperands, block_kinds, small
from .splash_blocks import ExternalBlocks

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["TRIED", "installed", "tokamax_splash_attention", "untried_version"]

TRIED = ("0.0.12", "0.0.17")  # the first with jax 0.10.2, the second with jax 0.12.0
_LISTED = 1 << 14  # most tiles of an open mask; 13 bytes of scalar memory each
_PACKAGE = "tokamax._src.ops.experimental.tpu.splash_attention"


def installed() -> bool:
    """Whether the kernel's module is installed; checked without an import."""
    spec = util.find_spec("tokamax")
    file = Path(*_PACKAGE.split(".")[1:], "splash_attention_kernel.py")
    return spec is not None and any((Path(root) / file).exists() for root in spec.submodule_search_locations or ())


def untried_version() -> str | None:
    """The installed version, if it isn't one that was tried."""
    version = _version()
    return None if version in TRIED else version


def _version() -> str:
    try:
        return metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def tokamax_splash_attention(
    call: ExternalCall, blocks: ExternalBlocks, *, residual_checkpoint_name: str | None, interpret: bool
) -> Float[Array, "batch heads q value_dim"]:
    """Attend with tokamax's kernel, forward and gradient. Its backward pass is the fused one."""
    splash, mask_info, base = _modules()
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    padded = blocks.padded(q_len, kv_len)
    arguments = call.operands(*padded)
    tables = functools.partial(_tables, arguments.mask, q_len, kv_len, *padded, call.shards)
    forward, backward = tables(*blocks.forward[:2], False), tables(*blocks.dkv[:2], True)
    alive = _alive(forward, arguments, call, blocks)
    if alive is not None and arguments.sinks is not None:
        arguments = arguments._replace(sinks=jnp.where(alive, arguments.sinks, 0.0))
    kernel = splash.SplashAttentionKernel(
        _info(mask_info, forward, arguments, call),
        _info(mask_info, backward, arguments, call),
        config=_config(splash, blocks, call.soft_cap, residual_checkpoint_name, interpret),
        is_mqa=False,
        save_residuals=False,
        mask_value=base.DEFAULT_MASK_VALUE,
        mask_function=arguments.function,
        fwd_mask_sparsity=1.0 if forward is None else forward.density,
        dkv_mask_sparsity=1.0 if backward is None else backward.density,
    )
    output = arguments.attend(lambda q, k, v, ids, sinks: kernel(q, k, v, ids and base.SegmentIds(*ids), sinks), q_len)
    return output if alive is None else jnp.where(alive, output, 0)


def _modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    """The kernel, its mask tables, and what both depend on; imported only here."""
    from importlib import import_module

    kernel, mask_info, base = (
        import_module(f"{_PACKAGE}.{name}")
        for name in ("splash_attention_kernel", "splash_attention_mask_info", "base")
    )
    return kernel, mask_info, base


def _config(
    splash: ModuleType, blocks: ExternalBlocks, soft_cap: float | None, name: str | None, interpret: bool
) -> Any:
    layouts = {"head_dim_minor": splash.QKVLayout.HEAD_DIM_MINOR, "seq_minor": splash.QKVLayout.SEQ_MINOR}
    return splash.SplashConfig(
        **blocks.keywords(),
        q_layout=layouts[blocks.q_layout],
        k_layout=layouts[blocks.k_layout],
        v_layout=layouts[blocks.v_layout],
        use_base2_exp=blocks.use_base2_exp,
        fuse_reciprocal=blocks.fuse_reciprocal,
        use_experimental_scheduler=blocks.use_experimental_scheduler,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=name,
        interpret=interpret,
    )


class _Tables(NamedTuple):
    """The steps of a pass for every shard: int [shards, steps]. Without `rows` and `cols` the steps are all tiles.

    `kinds` is 0 for a skipped tile, 1 for one with its mask, 2 for one without; `density` is the share of visible tiles.
    """

    rows: np.ndarray | None
    cols: np.ndarray | None
    kinds: np.ndarray
    steps: np.ndarray
    density: float


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
    of_keys: bool,
) -> _Tables | None:
    """The forward pass's live tiles in the order of query blocks or, with `of_keys`, all tiles by kv block.

    None for an open mask, unless its tiles are few: without a list the forward pass divides the step's number, and to lower that
    Pallas needs to know the device, so it couldn't be compiled without a TPU.
    """
    if isinstance(mask, Full) and (of_keys or (q_padded // block_q) * (kv_padded // block_kv) > _LISTED):
        return None
    kinds = block_kinds(mask, q_len, kv_len, q_padded, kv_padded, shards, block_q, block_kv)
    density = float((kinds > 0).mean())
    if of_keys:
        every = kinds.swapaxes(1, 2).reshape(shards, -1)
        return _Tables(None, None, every, np.full(shards, every.shape[1]), density)
    # A query block with no visible keys is visited once, because its output would otherwise never be written. Kind 1: in 0.0.12
    # the forward pass computes whatever it visits.
    kinds[:, :, 0] = np.where(kinds.any(axis=2), kinds[:, :, 0], 1)
    steps = (kinds > 0).sum(axis=(1, 2))
    # After a shard's steps comes a row of -1, outside the grid: it tells the kernel that the last row has ended.
    rows, cols, listed = (np.full((shards, steps.max()), -1) for _ in range(3))
    for shard, count in enumerate(steps):
        places = np.nonzero(kinds[shard])
        rows[shard, :count], cols[shard, :count], listed[shard, :count] = *places, kinds[shard][places]
    q_blocks, kv_blocks = kinds.shape[1:]
    return _Tables(small(rows, q_blocks - 1), small(cols, kv_blocks - 1), small(listed, 2), steps, density)


def _alive(
    tables: _Tables | None, arguments: ExternalOperands, call: ExternalCall, blocks: ExternalBlocks
) -> Array | None:
    """Whether the forward pass has a tile in which ids may match; None without ids.

    0.0.17 skips tiles in which they can't, by the blocks' least and greatest ids. If that leaves none at all, its
    log-sum-exp is the mask's value instead of the sink, and gradients come out wrong or NaN; they should be 0.
    """
    if arguments.segments is None:
        return None
    (q_low, q_high), (kv_low, kv_high) = (
        (blocked.min(-1), blocked.max(-1))
        for ids, block in zip(arguments.segments, blocks.forward[:2], strict=True)
        for blocked in [ids.reshape(ids.shape[0], -1, block)]
    )
    meet = ((q_high[:, :, None] >= kv_low[:, None]) & (kv_high[:, None] >= q_low[:, :, None])).any(axis=0)
    if tables is None:
        return meet.any()
    rows, cols = (_of_shard(x, call) for x in (tables.rows, tables.cols))
    assert rows is not None
    return (meet[rows, cols] & (rows >= 0)).any()


def _of_shard(x: np.ndarray | None, call: ExternalCall) -> Array | None:
    return None if x is None else jax.lax.dynamic_index_in_dim(jnp.asarray(x), call.shard, keepdims=False)


def _info(mask_info: ModuleType, tables: _Tables | None, arguments: ExternalOperands, call: ExternalCall) -> Any:
    if tables is None:
        return mask_info.MaskInfo(None, None, None, None, None, None, None)

    rows, cols, kinds = (_of_shard(x, call) for x in tables[:3])
    steps = None if rows is None else jax.lax.dynamic_slice_in_dim(jnp.asarray(tables.steps, jnp.int32), call.shard, 1)
    return mask_info.MaskInfo(
        mask_next=None,
        active_rows=rows,
        active_cols=cols,
        block_mask=kinds,
        num_active_blocks=steps,
        partial_mask_blocks=None,
        q_sequence=arguments.rows,
    )
