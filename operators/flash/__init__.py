"""Flash attention for GPUs: its config, how its sizes are chosen, and a call through its kernels."""

from .flash_config import FlashAttention2Config
from .flash_kernels import FLASH, NO_ROCM, FlashKernels

__all__ = ["FLASH", "NO_ROCM", "FlashAttention2Config", "FlashKernels"]
