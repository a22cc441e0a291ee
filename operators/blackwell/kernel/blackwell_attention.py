"""PartialBlackwell: the Blackwell kernels combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...kernels.operands import DynamicArgs, Operands, Results, StaticArgs
from ...mosaic.kernel.block import MosaicBlock
from ...mosaic.kernel.mosaic_attention import PartialMosaic
from .forward import BlackwellForward

__all__ = ["PartialBlackwell"]


@dataclass(frozen=True)
class PartialBlackwell(PartialMosaic):
    """The Blackwell kernels as a PartialAttention."""

    generation: ClassVar[str] = "blackwell"
    title: ClassVar[str] = "the kernels for Blackwell"
    kernels: ClassVar[Mapping[str, type[MosaicBlock]]] = {"forward": BlackwellForward}

    def differentiate(
        self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
    ) -> Operands:
        """All gradients in XLA, tile by tile."""
        made = self.in_xla(static_args, operands, dynamic, results)
        if self.layout == "bhtd":
            return made
        query, key, value = (x.swapaxes(1, 2) for x in (made.query, made.key, made.value))
        return made._replace(query=query, key=key, value=value)
