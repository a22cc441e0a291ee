"""occupancy: how many blocks of a kernel a multiprocessor holds at once, and what limits it.

The rules are those of NVIDIA's occupancy calculator for compute capability 8.0 to 10.0.
"""

from __future__ import annotations

from typing import NamedTuple

from ...devices import GpuSpec
from ...devices.gpus import REGISTERS, THREADS
from .cubin import RESERVED

__all__ = ["Occupancy", "occupancy"]

_WARP = 32
_PARTITIONS = 4  # per multiprocessor, each with a quarter of the registers; a block's warps are spread over all
_REGISTER_UNIT = 256  # registers are allocated to a warp in this unit
_SHARED_UNIT = 128  # bytes


class Occupancy(NamedTuple):
    """Blocks and warps on a multiprocessor at once, out of `most_warps`. limits: blocks by resource; bound: the tightest."""

    blocks: int
    warps: int
    most_warps: int
    limits: dict[str, int]
    bound: tuple[str, ...]


def occupancy(spec: GpuSpec, registers: int, threads: int, shared_bytes: int) -> Occupancy:
    """registers: per thread; threads and shared_bytes: per block, without the shared memory that the driver reserves."""
    warps = -(-threads // _WARP)
    dealt = -(-warps // _PARTITIONS) * _PARTITIONS
    of_warp = -(-max(registers, 1) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    of_block = -(-(shared_bytes + RESERVED) // _SHARED_UNIT) * _SHARED_UNIT
    limits = {
        "registers": REGISTERS // _PARTITIONS // of_warp * _PARTITIONS // dealt,
        "shared memory": spec.shared_bytes_a_core // of_block,
        "threads": THREADS // (warps * _WARP),
        "blocks": spec.blocks_a_core,
    }
    blocks = min(limits.values())
    bound = tuple(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, THREADS // _WARP, limits, bound)
