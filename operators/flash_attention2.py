"""flash_attn2: attnops' flash kernels for GPUs; on a TPU splash's kernels."""

from __future__ import annotations

from .flash import FlashAttention2Config
from .splash.kernel_operation import KernelOperation

__all__ = ["FlashAttention2", "FlashAttention2Config"]


class FlashAttention2(KernelOperation):
    """Like `splash`, but with the config of the GPU kernels; on a TPU the config of 'splash' applies."""

    name = "flash_attn2"
    config = FlashAttention2Config
