"""CpuRates: what a machine's cores do per second; virtual devices share them, so times add up over devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CpuRates"]


@dataclass(frozen=True)
class CpuRates:
    """Processor seconds, summed over all cores, as benchmarks/advise.py fits them on its own cases (docs/advise.md); here for
    an AMD EPYC with two cores, where the clock shows half of them at best.

    flops_per_second: for float32 products; weights_per_second: for a weight's work besides products; bytes_per_second: for
    what is sent; tile_seconds: per tile; step_seconds: per hop of a ring on one device.
    """

    flops_per_second: float = 100000000000.0
    weights_per_second: float = 2430000000.0
    bytes_per_second: float = 1150000000.0
    tile_seconds: float = 3.9e-08
    step_seconds: float = 0.000529
