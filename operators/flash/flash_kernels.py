"""The GPU flash kernels as an implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...planning import AttentionProblem, Implementation, OperationConfig, PassSizes, Placement, declares
from ...planning.implementations import dequantised_copy
from ...planning.notes import note
from ..call.local import LocalCall, LocalOutput
from ..choices.mask_blocks import block_remarks
from .flash_candidates import FLASH_SHIPPED, flash_candidates, flash_tuned_fields
from .flash_config import FlashAttention2Config
from .flash_rules import FLASH_FEATURES, FLASH_RULES, ON_ROCM
from .flash_sizes import resolve_flash, sizes_of, steps_note, unknown_gpu
from .run_flash import run_flash
from .tokamax_kernels import TokamaxKernels

__all__ = ["FLASH", "NO_ROCM", "FlashKernels"]


class FlashKernels(Implementation[FlashAttention2Config]):
    """attnops' flash kernels for NVIDIA's GPUs."""

    operation = "flash_attn2"
    config = FlashAttention2Config
    exact_products = True
    capability = declares(
        consumes=FLASH_FEATURES,
        rules=FLASH_RULES,
        # In the interpreter on CPU.
        tolerance={"float32": (1e-5, 3e-5), "bfloat16": (2e-2, 4e-2), "float16": (3e-3, 6e-3)},
    )

    def variant(self, config: OperationConfig) -> Implementation[Any]:
        """tokamax's kernels, if the config names them."""
        return _TOKAMAX if self.reads(config) and self.read(config).kernel == "tokamax" else self

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Run the kernels, forward and backward."""
        output, lse = run_flash(call, self.read(call.config))
        return LocalOutput(output, None, lse if call.return_lse else None)

    def resolve(self, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Every size, by the GPU and the local lengths."""
        return resolve_flash(problem, placement, self.read(problem.config))

    def works_on_parts(self, config: OperationConfig, strategy: str) -> bool:
        """On one part, and around a ring."""
        return True

    def passes(self, config: OperationConfig, backward: bool) -> tuple[PassSizes, ...]:
        """One kernel forward, two backward."""
        return tuple(
            PassSizes(name, size.block_q, size.block_kv, f"attnops_flash_{name}")
            for name, size in sizes_of(self.read(config)).items()
            if (name != "forward") == backward
        )

    def tuned_fields(self, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The unset sizes."""
        return flash_tuned_fields(problem, placement, self.read(problem.config))

    def candidates(self, problem: AttentionProblem, placement: Placement) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Sizes around the default choice, for both passes."""
        return flash_candidates(problem, placement, self.read(problem.config))

    def shipped_choice(self, problem: AttentionProblem, placement: Placement) -> tuple[str, Mapping[str, Any]] | None:
        """The choice in the shipped table."""
        return FLASH_SHIPPED.look_up(problem, placement)

    def check_vma(self, config: OperationConfig) -> bool:
        """Not in Pallas' interpreter."""
        return not self.read(config).interpret

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """A mask's blocks, what the gradient of quantised keys costs, an unknown GPU, and how tiles are computed."""
        local, sizes = placement.local, self.read(config)
        # Each query head has its own tiles, if they aren't folded into one.
        block_q, tables = (local.q_len, local.kv_heads) if sizes.fold else (sizes.block_q or 1, local.q_heads)
        notes = block_remarks(problem, placement, block_q, sizes.block_kv or 1, tables)
        if problem.quantised:
            notes = (*notes, note("memory.dequantised_gradient", **dequantised_copy(problem, placement)))
        of_device = unknown_gpu(problem, sizes), steps_note(problem, sizes)
        return (*notes, *(item for item in of_device if item is not None))


class _NoKernels(Implementation[OperationConfig]):
    """On ROCm every call is refused, by a rule."""

    operation = "flash_attn2"
    capability = declares(consumes=FLASH_FEATURES, rules=(ON_ROCM,), tolerance={})


FLASH, NO_ROCM, _TOKAMAX = FlashKernels(), _NoKernels(), TokamaxKernels()
