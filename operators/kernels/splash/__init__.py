"""Block-sparse flash attention for TPUs in Pallas, forward and backward."""

from __future__ import annotations

from ..splash_blocks import SplashBlocks
from .splash_attention import SplashPart

__all__ = ["SplashBlocks", "SplashPart"]
