"""blocksparse: splash for block masks, with tiles of plain XLA that can be declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ..planning import AttentionProblem, OperationConfig, Placement
from .mask_blocks import has_blocks
from .splash import Splash
from .vanilla import Vanilla, VanillaConfig

__all__ = ["BlockSparse", "BlockSparseConfig"]

_NATIVE = "forward_native"


class BlockSparseConfig(VanillaConfig):
    """See VanillaConfig: tiles in plain XLA; if unset, the mask's blocks choose them. Kernels use their operations' configs.

    The mask defines which blocks are seen: Blocks(layout, block_q, block_kv).
    """

    operation: Literal["blocksparse"] = "blocksparse"  # type: ignore[assignment]


class BlockSparse(Splash):
    """Only tiles with visible keys are visited: splash's kernels on TPUs, flash_attn2's on CUDA, blocks in XLA."""

    name = "blocksparse"
    config = BlockSparseConfig
    kernels_on: ClassVar[Mapping[str, str]] = {"tpu": "splash", "cuda": "flash_attn2"}

    @classmethod
    def reads_config(cls, method: str) -> bool:
        """Each of its methods reads a config."""
        return True

    @classmethod
    def works_on_parts(cls, method: str, config: OperationConfig, strategy: str) -> bool:
        """The same as for the method's owner."""
        if method == _NATIVE:
            return Vanilla.works_on_parts(method, config, strategy)
        return super().works_on_parts(method, config, strategy)

    @classmethod
    def tuned_fields(cls, method: str, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The unset sizes of the implementation that runs."""
        if method == _NATIVE:
            return Vanilla.tuned_fields(method, problem, placement)
        return super().tuned_fields(method, problem, placement)

    @classmethod
    def candidates(
        cls, method: str, problem: AttentionProblem, placement: Placement
    ) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Sizes of the implementation that runs."""
        if method == _NATIVE:
            return Vanilla.candidates(method, problem, placement)
        return super().candidates(method, problem, placement)

    @classmethod
    def remarks(
        cls, method: str, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> tuple[str, ...]:
        """Also reports a mask without blocks."""
        if method == _NATIVE and isinstance(config, VanillaConfig):
            notes = Vanilla.remarks(method, problem, placement, config)
        else:
            notes = super().remarks(method, problem, placement, config)
        given = sorted(config.model_fields_set - {"operation", "schema_version"})
        if method == _NATIVE and given and not isinstance(config, VanillaConfig):
            notes = (*notes, f"{method} doesn't read the config's {', '.join(given)}")
        if has_blocks(problem):
            return notes
        return (
            *notes,
            "no part of the mask defines which blocks are seen: declare Blocks, or a pattern of attnops.masks",
        )
