"""Block-sparse flash attention for TPUs in Pallas, forward and backward."""

from __future__ import annotations

from .attention import SplashPart, splash_attention
from .block_sizes import SplashBlocks

__all__ = ["SplashBlocks", "SplashPart", "splash_attention"]
