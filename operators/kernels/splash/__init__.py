"""Block-sparse flash attention for TPUs in Pallas, forward and backward."""

from __future__ import annotations

from .attention import splash_attention
from .blocks import SplashBlocks

__all__ = ["SplashBlocks", "splash_attention"]
