"""Block-sparse flash attention for TPUs in Pallas, forward and backward."""

from __future__ import annotations

from .block_sizes import SplashBlocks
from .splash_attention import SplashPart, splash_attention

__all__ = ["SplashBlocks", "SplashPart", "splash_attention"]
