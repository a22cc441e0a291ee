"""flash_attn2: attnops' flash kernels for GPUs; on a TPU splash's kernels."""

from __future__ import annotations

from .blackwell import BLACKWELL
from .call.base import Operation
from .flash import FLASH, NO_ROCM, FlashAttention2Config
from .hopper import HOPPER
from .splash.splash_kernels import SPLASH
from .vanilla.operation import NATIVE

__all__ = ["FlashAttention2", "FlashAttention2Config"]


class FlashAttention2(Operation):
    """Like `splash`, but with the config of the GPU kernels; on a TPU the config of 'splash' applies."""

    name = "flash_attn2"
    config = FlashAttention2Config
    forward_tpu = SPLASH
    forward_blackwell = BLACKWELL
    forward_hopper = HOPPER
    forward_cuda = FLASH
    forward_rocm = NO_ROCM
    forward_native = NATIVE
