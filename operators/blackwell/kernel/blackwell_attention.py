"""PartialBlackwell: the Blackwell kernels combined, with their gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...mosaic.kernel.block import MosaicBlock
from ...mosaic.kernel.mosaic_attention import PartialMosaic
from .backward_keys import BlackwellKeyGradients
from .backward_query import BlackwellQueryGradient
from .blackwell_sizes import ROWS
from .forward import BlackwellForward

__all__ = ["PartialBlackwell"]


@dataclass(frozen=True)
class PartialBlackwell(PartialMosaic):
    """The Blackwell kernels as a PartialAttention."""

    generation: ClassVar[str] = "blackwell"
    lines: ClassVar[int] = ROWS
    title: ClassVar[str] = "the kernels for Blackwell"
    kernels: ClassVar[Mapping[str, type[MosaicBlock]]] = {
        "forward": BlackwellForward, "dkv": BlackwellKeyGradients, "dq": BlackwellQueryGradient,
    }  # fmt: skip
