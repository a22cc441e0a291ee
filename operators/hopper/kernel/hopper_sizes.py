"""The sizes of the Hopper kernel, and the shared memory that they take."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DIM_STEP", "KEYS", "ROWS", "HopperSizes", "padded_dim", "shared_bytes"]

ROWS = 64  # of a warpgroup: those of a wgmma
KEYS = (
    64,
    128,
    256,
)  # of a tile: a product with values goes through 64 keys at once, one for logits has at most 256 columns
DIM_STEP = 64  # 128 bytes of 16-bit numbers, the widest rows that shared memory swizzles
_ALIGNMENT = 2560  # what Mosaic adds so that arrays begin where they may
_BARRIER, _FLOAT = 8, 4


class HopperSizes(NamedTuple):
    """block_q: rows of a block of threads, 64 for each warpgroup that computes. block_kv: keys of a tile. stages: tiles of keys,
    and of values, that shared memory holds."""

    block_q: int
    block_kv: int
    stages: int

    @property
    def consumers(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.block_q // ROWS


def padded_dim(dim: int) -> int:
    """The columns of a tile for a head dim."""
    return -(-dim // DIM_STEP) * DIM_STEP


def shared_bytes(sizes: HopperSizes, dim: int, value_dim: int) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold. Numbers have 16 bits; the output takes the place of a
    query of as many."""
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    return {
        "query": 2 * sizes.block_q * dim,
        "key": 2 * sizes.stages * sizes.block_kv * dim,
        "value": 2 * sizes.stages * sizes.block_kv * value_dim,
        "output": 2 * sizes.block_q * value_dim if value_dim != dim else 0,
        "lse": _FLOAT * sizes.block_q,
        "barriers": _BARRIER * (sizes.consumers + 4 * sizes.stages),
        "alignment": _ALIGNMENT,
    }
