"""KernelOperation: what operations that run the same kernels have in common: which one each platform runs."""

from __future__ import annotations

from ..blackwell import BLACKWELL
from ..call.base import Operation
from ..flash import FLASH, NO_ROCM
from ..hopper import HOPPER
from ..vanilla.operation import NATIVE
from .splash_kernels import SPLASH

__all__ = ["KernelOperation"]


class KernelOperation(Operation):
    """splash's kernels on TPUs, flash_attn2's on GPUs; elsewhere plain XLA."""

    forward_tpu = SPLASH
    forward_blackwell = BLACKWELL
    forward_hopper = HOPPER
    forward_cuda = FLASH
    forward_rocm = NO_ROCM
    forward_native = NATIVE
