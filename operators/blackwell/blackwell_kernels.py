"""The Blackwell kernels as an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...planning import OperationConfig, declares
from ..mosaic.kernel.mosaic_sizes import MosaicSizes
from ..mosaic.mosaic_kernels import WARPS_OF_GROUP, MosaicKernels
from ..mosaic.mosaic_rules import MOSAIC_FEATURES
from ..mosaic.mosaic_sizes import Sizing
from .blackwell_rules import BLACKWELL_RULES
from .blackwell_sizes import BlackwellSizing
from .kernel.backward_sizes import COMPUTING
from .kernel.blackwell_sizes import PART, asks

if TYPE_CHECKING:
    from ..mosaic.kernel.mosaic_attention import PartialMosaic

__all__ = ["BLACKWELL", "BlackwellKernels"]


class BlackwellKernels(MosaicKernels):
    """attnops' kernels for Blackwell."""

    devices = "Blackwell"
    generation: ClassVar[str] = "blackwell"
    architecture: ClassVar[str] = "blackwell"
    interpreted_as: ClassVar[str] = "blackwell"
    helping: ClassVar[int] = 2 * WARPS_OF_GROUP  # forward a group corrects sums; backward one issues products
    programs: ClassVar[int] = 1
    sizing: ClassVar[Sizing] = BlackwellSizing()
    capability = declares(
        consumes=MOSAIC_FEATURES,
        rules=BLACKWELL_RULES,
        # In the interpreter on CPU.
        tolerance={"bfloat16": (2e-2, 4e-2), "float16": (3e-3, 6e-3)},
    )

    def columns_of_part(self, which: str, across: int) -> int:
        """See MosaicKernels. Of gradients two warpgroups have a half of a tile's columns each."""
        return PART if which == "forward" else across // COMPUTING

    def asks(self, which: str, sizes: MosaicSizes) -> bool:
        """See MosaicKernels."""
        return which == "forward" and asks(sizes)

    def check_vma(self, config: OperationConfig) -> bool:
        """JAX can't trace the warps of a kernel under it."""
        return False

    @staticmethod
    def partial() -> type[PartialMosaic]:
        """See MosaicKernels."""
        from .kernel.blackwell_attention import PartialBlackwell

        return PartialBlackwell


BLACKWELL = BlackwellKernels()
