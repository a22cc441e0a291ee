"""The forward pass of flash attention for Hopper, in Pallas' Mosaic GPU flavour; its gradients are the GPU kernels' own."""

from .hopper_kernels import HOPPER, HopperKernels

__all__ = ["HOPPER", "HopperKernels"]
