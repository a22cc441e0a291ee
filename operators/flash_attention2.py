"""flash_attn2: attnops' flash kernels for GPUs; on a TPU splash's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from .flash import FlashAttention2Config
from .splash import Splash

__all__ = ["FlashAttention2", "FlashAttention2Config"]


class FlashAttention2(Splash):
    """Like `splash`, but with the config of the GPU kernels; on a TPU the config of 'splash' applies."""

    name = "flash_attn2"
    config = FlashAttention2Config
    kernels_on: ClassVar[Mapping[str, str]] = {"tpu": "splash"}
