"""blocksparse: splash for block masks, with tiles of plain XLA that can be declared."""

from __future__ import annotations

from typing import Literal

from ..planning import AttentionProblem
from ..planning.notes import note
from .choices.mask_blocks import has_blocks
from .splash.kernel_operation import KernelOperation
from .vanilla.vanilla_config import VanillaConfig

__all__ = ["BlockSparse", "BlockSparseConfig"]


class BlockSparseConfig(VanillaConfig):
    """See VanillaConfig: tiles in plain XLA; if unset, the mask's blocks choose them. Kernels use their operations' configs.

    The mask defines which blocks are seen: Blocks(layout, block_q, block_kv).
    """

    operation: Literal["blocksparse"] = "blocksparse"  # type: ignore[assignment]


class BlockSparse(KernelOperation):
    """Only tiles with visible keys are visited: splash's kernels on TPUs, flash_attn2's on CUDA, blocks in XLA."""

    name = "blocksparse"
    config = BlockSparseConfig

    @classmethod
    def remarks(cls, problem: AttentionProblem) -> tuple[str, ...]:
        """Reports a mask without blocks."""
        if has_blocks(problem):
            return ()
        return (note("blocks.none"),)
