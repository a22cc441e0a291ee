"""Flash attention for Blackwell, in Pallas' Mosaic GPU flavour."""

from .blackwell_kernels import BLACKWELL, BlackwellKernels

__all__ = ["BLACKWELL", "BlackwellKernels"]
