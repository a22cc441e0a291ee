"""CpuRates: what a machine's cores do in a second; virtual devices share them, so that times add up over devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CpuRates"]


@dataclass(frozen=True)
class CpuRates:
    """Fitted by benchmarks/advise.py on cases of its own (docs/advise.md); of two cores of an AMD EPYC.

    flops_per_second: of products in float32, all devices together; weights_per_second: of what a weight takes beside products;
    bytes_per_second: of what is sent; tile_seconds: of a tile, step_seconds: of a hop of a ring on one device.
    """

    flops_per_second: float = 1.0e11
    weights_per_second: float = 1.0e9
    bytes_per_second: float = 2.0e9
    tile_seconds: float = 2.0e-5
    step_seconds: float = 2.0e-4
