"""CpuRates: what a machine's cores do in a second; virtual devices share them, so that times add up over devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CpuRates"]


@dataclass(frozen=True)
class CpuRates:
    """Processor seconds, of all cores together, as benchmarks/advise.py fits them on cases of its own (docs/advise.md), here of
    an AMD EPYC with two cores, where the clock shows half of them at best.

    flops_per_second: of products in float32; weights_per_second: of what a weight takes beside products; bytes_per_second: of
    what is sent; tile_seconds: of a tile; step_seconds: of a hop of a ring on one device.
    """

    flops_per_second: float = 100000000000.0
    weights_per_second: float = 4600000000.0
    bytes_per_second: float = 1000000000.0
    tile_seconds: float = 1.56e-07
    step_seconds: float = 0.000657
