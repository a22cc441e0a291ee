"""The tiles of the backward pass on Blackwell: what they take of shared memory and of tensor memory."""

from __future__ import annotations

from ...mosaic.kernel.mosaic_sizes import BARRIER, FLOAT, MosaicSizes, padded_dim, placed
from .blackwell_sizes import TENSOR_COLUMNS

__all__ = ["COMPUTING", "STEPS", "divided", "gradient_bytes", "gradient_columns", "pipelined"]

STEPS = (64, 128)  # rows or keys of a tile, of those that a block goes through
COMPUTING = 2  # warpgroups that compute: each has half of the columns


def pipelined(sizes: MosaicSizes) -> bool:
    """Whether the products of a tile's logits are issued before the sums of the tile before, which then is still needed."""
    return sizes.stages > 1


def divided(dim: int, value_dim: int) -> bool:
    """Whether a block sums the gradients of the values and then those of the keys: tensor memory can't hold both."""
    return padded_dim(dim) + padded_dim(value_dim) + 2 * min(STEPS) > TENSOR_COLUMNS


def gradient_columns(which: str, sizes: MosaicSizes, dim: int, value_dim: int) -> dict[str, int]:
    """Columns of tensor memory by what they hold. which: 'dkv' or 'dq'."""
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    if which == "dkv":
        sums = {"sums": max(dim, value_dim)} if divided(dim, value_dim) else {"d_key": dim, "d_value": value_dim}
        return {**sums, "logits": sizes.block_q, "d_weights": sizes.block_q}
    keys = sizes.block_kv
    return {"d_query": dim, "logits": keys, "d_weights": keys, "d_logits": keys // 2}


def gradient_bytes(which: str, sizes: MosaicSizes, dim: int, value_dim: int) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold. Numbers have 16 bits; gradients take the place of what
    they are of."""
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    held = {
        "query": 2 * sizes.block_q * dim, "key": 2 * sizes.block_kv * dim, "value": 2 * sizes.block_kv * value_dim,
        "d_output": 2 * sizes.block_q * value_dim,
    }  # fmt: skip
    for name in ("query", "d_output") if which == "dkv" else ("key", "value"):
        held[name] *= sizes.stages
    barriers = 2 * sizes.stages + 12 if which == "dkv" else 4 * sizes.stages + 7
    held["lse"] = 2 * placed(FLOAT * sizes.stages * sizes.block_q) if which == "dkv" else 0
    return held | {"barriers": BARRIER * barriers}
