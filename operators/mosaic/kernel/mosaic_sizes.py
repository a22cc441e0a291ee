"""The sizes of kernels in Mosaic GPU, and columns of their tiles."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

__all__ = [
    "BARRIER",
    "DIM_STEP",
    "FLOAT",
    "MOST_COLUMNS",
    "MosaicSizes",
    "MosaicTiles",
    "Sums",
    "column_parts",
    "equal_share",
    "latent_columns",
    "latent_sums",
    "padded_dim",
    "placed",
    "swizzled_columns",
]

DIM_STEP = 32  # 64 bytes of 16-bit numbers; of 64 columns and more, shared memory swizzles rows of 128 bytes
BARRIER, FLOAT = 8, 4  # bytes
MOST_COLUMNS = 256  # of an output, whose sums a warpgroup holds
_ALIGNMENT = 1024
_REGISTERS, _THREADS = 65536, 128  # of a multiprocessor, and of a warpgroup
_MOST_REGISTERS = 255  # of a thread


class MosaicSizes(NamedTuple):
    """block_q, block_kv: rows and keys of a tile. stages: tiles that shared memory holds, of those that a block goes through:
    keys and values, or queries and the output's gradients."""

    block_q: int
    block_kv: int
    stages: int


class MosaicTiles(NamedTuple):
    """The sizes of the forward pass, of the gradients of key and value, and of that of the query."""

    forward: MosaicSizes
    dkv: MosaicSizes
    dq: MosaicSizes


class Sums(NamedTuple):
    """Sums of gradients, of so many columns from `first` on. of: the arrays whose gradients are summed in them."""

    of: tuple[str, ...]
    first: int
    columns: int


def padded_dim(dim: int) -> int:
    """The columns of a tile for a head dim."""
    return -(-dim // DIM_STEP) * DIM_STEP


def swizzled_columns(*columns: int) -> int:
    """Numbers of a row of shared memory that are swizzled together, where so many lie in it or are read of it at once."""
    return DIM_STEP if any(n % (2 * DIM_STEP) for n in columns) else 2 * DIM_STEP


def equal_share(warpgroups: int) -> int:
    """Registers with which each thread of so many warpgroups begins, of a block that has a multiprocessor to itself."""
    return min(_REGISTERS // (_THREADS * warpgroups) // 8 * 8, _MOST_REGISTERS)


def column_parts(columns: int) -> int:
    """Those into which the columns of an output are divided: one has their sums for some rows."""
    return -(-columns // MOST_COLUMNS)


def latent_columns(dim: int, value_dim: int) -> int:
    """The columns of values that are the first numbers of their keys: whole parts of the key's tile, as it is swizzled, for each
    of the warpgroups that share them."""
    step = swizzled_columns(padded_dim(dim)) * (2 if value_dim > MOST_COLUMNS else 1)
    return -(-value_dim // step) * step


def placed(size: int) -> int:
    """The bytes that an array takes in shared memory: each begins where 1024 divides."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def latent_sums(first: int, end: int, value_dim: int) -> tuple[Sums, ...]:
    """These columns of keys whose first columns are their values, in parts that one product can have, whose values are summed all
    or not at all."""
    made: list[Sums] = []
    for start, stop in itertools.pairwise(sorted({first, end, min(max(value_dim, first), end)})):
        count = DIM_STEP * math.ceil((stop - start) / (column_parts(stop - start) * DIM_STEP))
        of = ("key", "value") if start < value_dim else ("key",)
        made += [Sums(of, at, min(count, stop - at)) for at in range(start, stop, count)]
    return tuple(made)
