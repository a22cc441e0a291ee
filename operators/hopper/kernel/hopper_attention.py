"""PartialHopper: the Hopper kernels combined, with their gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...mosaic.kernel.block import MosaicBlock
from ...mosaic.kernel.mosaic_attention import PartialMosaic
from .backward_keys import HopperKeyGradients
from .backward_query import HopperQueryGradient
from .forward import HopperForward
from .hopper_sizes import ROWS

__all__ = ["PartialHopper"]


@dataclass(frozen=True)
class PartialHopper(PartialMosaic):
    """The Hopper kernels as a PartialAttention."""

    generation: ClassVar[str] = "hopper"
    lines: ClassVar[int] = ROWS
    title: ClassVar[str] = "the kernels for Hopper"
    kernels: ClassVar[Mapping[str, type[MosaicBlock]]] = {
        "forward": HopperForward, "dkv": HopperKeyGradients, "dq": HopperQueryGradient,
    }  # fmt: skip
