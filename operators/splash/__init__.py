"""splash: block-sparse flash attention on TPUs and NVIDIA GPUs; elsewhere it runs vanilla."""

from __future__ import annotations

from typing import ClassVar

from ...planning import OperationConfig
from ..blackwell import BLACKWELL
from ..call.base import Operation
from ..flash import FLASH, NO_ROCM
from ..hopper import HOPPER
from ..vanilla.operation import NATIVE
from .splash_config import SplashConfig
from .splash_kernels import SPLASH

__all__ = ["Splash", "SplashConfig"]


class Splash(Operation):
    """Pallas kernels behind one declaration, which handles padding, masks, offsets and sharding."""

    name = "splash"
    config: ClassVar[type[OperationConfig]] = SplashConfig
    forward_tpu = SPLASH
    forward_blackwell = BLACKWELL
    forward_hopper = HOPPER
    forward_cuda = FLASH
    forward_rocm = NO_ROCM
    forward_native = NATIVE
