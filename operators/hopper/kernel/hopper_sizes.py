"""The sizes of the Hopper kernels, and the shared memory that they take."""

from __future__ import annotations

from ...mosaic.kernel.mosaic_sizes import BARRIER, FLOAT, MosaicSizes, padded_dim, placed

__all__ = ["KEYS", "ROWS", "divided", "key_warpgroups", "shared_bytes"]

ROWS = 64  # of a warpgroup: those of a wgmma
KEYS = (
    64,
    128,
    256,
)  # of a tile: a product with values goes through 64 keys at once, one for logits has at most 256 columns
_REDUCTIONS = 2048  # what Mosaic takes for the sum and the maximum of a row
_MOST_SUMS = 256  # columns of gradients that a warpgroup can hold beside its tiles


def divided(dim: int, value_dim: int) -> bool:
    """Whether the gradients of key and value are summed by a warpgroup each, because one can't hold both."""
    return padded_dim(dim) + padded_dim(value_dim) > _MOST_SUMS


def key_warpgroups(sizes: MosaicSizes, dim: int, value_dim: int) -> int:
    """Warpgroups that compute the gradients of key and value."""
    return 2 if divided(dim, value_dim) else sizes.block_kv // ROWS


def shared_bytes(which: str, sizes: MosaicSizes, dim: int, value_dim: int) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold. which: 'forward', 'dkv' or 'dq'. Numbers have 16 bits; an
    output takes the place of an input of as many columns."""
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    held = {"query": 2 * sizes.block_q * dim, "key": 2 * sizes.block_kv * dim, "value": 2 * sizes.block_kv * value_dim}
    if which != "forward":
        held["d_output"] = 2 * sizes.block_q * value_dim
    for name in ("query", "d_output") if which == "dkv" else ("key", "value"):
        held[name] *= sizes.stages
    groups = key_warpgroups(sizes, dim, value_dim) if which == "dkv" else sizes.block_q // ROWS
    held["columns"] = placed(FLOAT * groups * (sizes.block_q if which == "dkv" else sizes.block_kv))
    if which == "dkv":
        held["lse"] = 2 * placed(FLOAT * sizes.stages * sizes.block_q)
        barriers = sizes.block_kv // ROWS + 2 * sizes.stages + divided(dim, value_dim)
    else:
        held["lse"] = placed(FLOAT * sizes.block_q) if which == "forward" else 0
        barriers = groups + 4 * sizes.stages
    if which == "forward":
        held["output"] = 2 * sizes.block_q * value_dim if value_dim != dim else 0
        held["reductions"] = _REDUCTIONS
    return held | {"barriers": BARRIER * barriers}
