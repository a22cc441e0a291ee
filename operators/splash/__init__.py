"""splash: block-sparse flash attention on TPUs and NVIDIA GPUs; elsewhere it runs vanilla."""

from __future__ import annotations

from typing import ClassVar

from ...planning import OperationConfig
from .kernel_operation import KernelOperation
from .splash_config import SplashConfig

__all__ = ["Splash", "SplashConfig"]


class Splash(KernelOperation):
    """Pallas kernels behind one declaration, which handles padding, masks, offsets and sharding."""

    name = "splash"
    config: ClassVar[type[OperationConfig]] = SplashConfig
