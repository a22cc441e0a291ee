"""The tiles of the backward pass on Blackwell: what they take of shared memory and of tensor memory."""

from __future__ import annotations

from ...mosaic.kernel.mosaic_sizes import BARRIER, DIM_STEP, FLOAT, MosaicSizes, Sums, latent_sums, padded_dim, placed
from .blackwell_sizes import ROWS, TENSOR_COLUMNS

__all__ = ["COMPUTING", "FEW", "PIECE", "STEPS", "gradient_bytes", "gradient_columns", "gradient_turns", "pipelined"]

STEPS = (64, 128)  # rows or keys of a tile, of those that a block goes through
FEW = 32  # of latents' tiles, which have more columns
COMPUTING = 2  # warpgroups that compute: each has half of the columns
PIECE = 16  # columns of sums that a warpgroup stores at once, where the places of what they are of are still read

Turns = tuple[tuple[Sums, ...], ...]


def pipelined(sizes: MosaicSizes) -> bool:
    """Whether the products of a tile's logits are issued before the sums of the tile before, which then is still needed."""
    return sizes.stages > 1


def gradient_turns(which: str, dim: int, value_dim: int, *, in_key: bool = False) -> Turns:
    """What a block sums each time that it goes through its tiles: as much as tensor memory holds. which: 'dkv' or 'dq'. in_key:
    values are the first columns of their keys."""
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    if in_key:
        return _latent_turns(which, dim, value_dim)
    key, value = Sums(("key",), 0, dim), Sums(("value",), 0, value_dim)
    if which == "dq":
        return ((key,),)
    together = dim + value_dim + 2 * min(STEPS) <= TENSOR_COLUMNS
    return ((value, key),) if together else ((value,), (key,))


def _latent_turns(which: str, dim: int, value_dim: int) -> Turns:
    """Columns of keys in equal parts. Where a query's gradient takes several turns, tensor memory also holds the output's
    gradient, for which shared memory has no room; and gradients of logits take the place of those of weights."""
    room = TENSOR_COLUMNS - 2 * FEW
    if which == "dq":
        room -= FEW // 2 if dim + FEW // 2 <= room else value_dim // 2
    step = DIM_STEP * -(-dim // (-(-dim // room) * DIM_STEP))
    return tuple(latent_sums(first, min(first + step, dim), value_dim) for first in range(0, dim, step))


def gradient_columns(
    which: str, sizes: MosaicSizes, dim: int, value_dim: int, *, in_key: bool = False
) -> dict[str, int]:
    """Columns of tensor memory by what they hold. which: 'dkv' or 'dq'."""
    turns = gradient_turns(which, dim, value_dim, in_key=in_key)
    size = sizes.block_q if which == "dkv" else sizes.block_kv
    held = {"sums": max(sum(one.columns for one in turn) for turn in turns), "logits": size, "d_weights": size}
    if which == "dq":
        held |= {"d_logits": size // 2} if len(turns) == 1 else {"d_output": padded_dim(value_dim) // 2}
    return held


def gradient_bytes(which: str, sizes: MosaicSizes, dim: int, value_dim: int, *, in_key: bool = False) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold. Numbers have 16 bits; gradients take the place of what
    they are of, or pass through that of a piece."""
    several = len(gradient_turns(which, dim, value_dim, in_key=in_key)) > 1
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    held = {
        "query": 2 * sizes.block_q * dim, "key": 2 * sizes.block_kv * dim,
        "value": 0 if in_key else 2 * sizes.block_kv * value_dim, "d_output": 2 * sizes.block_q * value_dim,
    }  # fmt: skip
    for name in ("query", "d_output") if which == "dkv" else ("key", "value"):
        held[name] *= sizes.stages
    streams = 1 if in_key else 2
    if which == "dkv":
        barriers = 2 * sizes.stages + 10 + streams + (several and not in_key)
    else:
        barriers = 2 * streams * sizes.stages + 9 + several
        held["d_output"] *= not several
    held["pieces"] = 2 * COMPUTING * ROWS * PIECE if several and in_key else 0
    held["lse"] = 2 * placed(FLOAT * sizes.stages * sizes.block_q) if which == "dkv" else 0
    return held | {"barriers": BARRIER * barriers}
