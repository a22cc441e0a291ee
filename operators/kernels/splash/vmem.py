"""How much VMEM a pass takes, and how much a TPU has: to choose blocks before the compiler is asked."""

from __future__ import annotations

import math
from typing import NamedTuple

from .blocks import SplashBlocks
from .frame import Heads

__all__ = ["Shape", "Vmem", "backward_bytes", "forward_bytes", "vmem_of"]

_LANES = 128
_MIB = 1 << 20


class Vmem(NamedTuple):
    """Bytes that a kernel gets unless it asks for more, and the most that it can have; a larger request is clamped."""

    default: int
    most: int


# By device kind, as JAX names it; found by compiling with libtpu 0.0.51 for described topologies.
_OF_KIND = {
    "TPU v4": Vmem(16 * _MIB, 16 * _MIB),
    "TPU v5 lite": Vmem(16 * _MIB, 128 * _MIB),
    "TPU v5": Vmem(16 * _MIB, int(63.94 * _MIB)),
    "TPU v5p": Vmem(16 * _MIB, int(63.94 * _MIB)),
    "TPU v6 lite": Vmem(32 * _MIB, int(127.94 * _MIB)),
    "TPU7x": Vmem(32 * _MIB, int(63.94 * _MIB)),
}


def vmem_of(device_kind: str) -> Vmem:
    """What a kind of TPU has; of one that isn't known, the least of all."""
    return _OF_KIND.get(device_kind, Vmem(16 * _MIB, 16 * _MIB))


class Shape(NamedTuple):
    """One device's problem, as far as memory goes. itemsize: bytes of an element in the run-time dtype; of key and value as
    they are given, (itemsize, whether there is a scale).
    """

    q_len: int
    kv_len: int
    heads: Heads
    dim: int
    value_dim: int
    itemsize: int
    dense_itemsize: int  # bytes a weight of bias and mask arrays together; 0 without
    key: tuple[int, bool]
    value: tuple[int, bool]


def forward_bytes(shape: Shape, blocks: SplashBlocks) -> int:
    """Blocks twice, for the pipeline, sums, and the tile that is being worked on. A lower bound: registers spill, too."""
    tiles, rows, keys = len(shape.heads.in_tile), blocks.block_q, blocks.block_kv
    widths = _lanes(shape.dim), _lanes(shape.value_dim)
    moved = tiles * rows * sum(widths) * shape.itemsize + tiles * 8 * rows * 4
    working = _working(rows, blocks.block_kv_compute, shape.itemsize)
    for width, (itemsize, scaled) in zip(widths, (shape.key, shape.value), strict=True):
        moved += shape.heads.kv_tile * keys * (width * itemsize + 8 * 4 * scaled)
        if itemsize != shape.itemsize:
            working += blocks.block_kv_compute * width * (shape.itemsize + 4)  # on its way through float32
    moved += shape.dense_itemsize * rows * keys * tiles
    sums = tiles * rows * (2 * _LANES + _lanes(shape.value_dim)) * 4
    return 2 * moved + sums + working


def backward_bytes(shape: Shape, blocks: SplashBlocks) -> int:
    """The same of the larger of the backward passes."""
    tiles, kv_tile = len(shape.heads.in_tile), shape.heads.kv_tile
    dims = _lanes(shape.dim) + _lanes(shape.value_dim)

    def of_pass(rows: int, keys: int, compute: int, of_query: bool, of_keys: bool) -> int:
        moved = (tiles * rows * dims + kv_tile * keys * dims) * shape.itemsize + 2 * tiles * 8 * rows * 4
        moved += shape.dense_itemsize * rows * keys * tiles
        sums = 0
        if of_query:
            moved += tiles * rows * _lanes(shape.dim) * shape.itemsize
            sums += tiles * rows * _lanes(shape.dim) * 4
        if of_keys:
            length = math.ceil(shape.kv_len / keys) * keys if of_query else keys
            moved += kv_tile * length * dims * shape.itemsize
            sums += kv_tile * length * dims * 4
        return 2 * moved + sums + _working(rows, compute, shape.itemsize) * 2

    if blocks.use_fused_bwd_kernel:
        return of_pass(blocks.block_q_dkv, blocks.block_kv_dkv, blocks.block_kv_dkv_compute, True, True)
    return max(
        of_pass(blocks.block_q_dkv, blocks.block_kv_dkv, blocks.block_kv_dkv_compute, False, True),
        of_pass(blocks.block_q_dq or 0, blocks.block_kv_dq or 0, blocks.block_kv_dq or 0, True, False),
    )


def _working(rows: int, compute: int, itemsize: int) -> int:
    """Logits of a tile in float32, and the weights in the input's type; a product in float32 splits both factors in three."""
    return rows * compute * (6 if itemsize == 2 else 18)


def _lanes(dim: int) -> int:
    return math.ceil(dim / _LANES) * _LANES
