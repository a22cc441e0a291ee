"""loop_bound: which unit of a multiprocessor a kernel's loop keeps busy the longest, by the units' published rates."""

from __future__ import annotations

from typing import NamedTuple

from ...devices import GpuSpec
from .sass import TileLoop

__all__ = ["LoopBound", "loop_bound"]

_WARP = 32


class LoopBound(NamedTuple):
    """cycles: per unit, for one turn of the loop by all warps on a multiprocessor at once; None where it can't be
    determined. "stalls": the turn of one warp by its schedule, which other warps fill. bound: the longest."""

    cycles: dict[str, float | None]
    bound: str


def loop_bound(spec: GpuSpec, loop: TileLoop, warps: int) -> LoopBound:
    """The bound for so many warps at once on a multiprocessor. Computed, not measured: units waiting for each other are left
    out."""
    cycles = {
        "tensor cores": None if loop.tensor_flops is None else loop.tensor_flops * warps / spec.tensor_flops_a_cycle,
        "EX2": loop.ex2 * _WARP * warps / spec.ex2_a_cycle,
        "FP32": loop.float32 * _WARP * warps / spec.fp32_a_cycle,
        "issue": loop.instructions * warps / spec.issued_a_cycle,
        "stalls": float(loop.stall_cycles),
    }
    return LoopBound(cycles, max(cycles, key=lambda unit: cycles[unit] or 0.0))
