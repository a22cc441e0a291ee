"""The Hopper kernels as an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...planning import declares
from ..mosaic.mosaic_kernels import MosaicKernels
from ..mosaic.mosaic_rules import MOSAIC_FEATURES
from ..mosaic.mosaic_sizes import Sizing
from .hopper_rules import HOPPER_RULES
from .hopper_sizes import HopperSizing

if TYPE_CHECKING:
    from ..mosaic.kernel.mosaic_attention import PartialMosaic

__all__ = ["HOPPER", "HopperKernels"]


class HopperKernels(MosaicKernels):
    """attnops' kernels for Hopper."""

    devices = "Hopper"
    generation: ClassVar[str] = "hopper"
    architecture: ClassVar[str] = "hopper"
    interpreted_as: ClassVar[str] = "mosaic"
    sizing: ClassVar[Sizing] = HopperSizing()
    capability = declares(
        consumes=MOSAIC_FEATURES,
        rules=HOPPER_RULES,
        # In the interpreter on CPU.
        tolerance={"bfloat16": (2e-2, 4e-2), "float16": (3e-3, 6e-3)},
    )

    @staticmethod
    def partial() -> type[PartialMosaic]:
        """See MosaicKernels."""
        from .kernel.hopper_attention import PartialHopper

        return PartialHopper


HOPPER = HopperKernels()
