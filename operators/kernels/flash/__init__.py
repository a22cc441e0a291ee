"""Flash attention for GPUs in Pallas' Triton flavour, forward and backward; it also runs in Pallas' interpreter."""

from .flash_attention import FlashPart

__all__ = ["FlashPart"]
