"""Flash attention for Hopper, in Pallas' Mosaic GPU flavour."""

from .hopper_kernels import HOPPER, HopperKernels

__all__ = ["HOPPER", "HopperKernels"]
