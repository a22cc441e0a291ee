"""The Hopper kernel as an implementation: its own forward pass, and the gradients of the kernels in Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...planning import AttentionProblem, OperationConfig, PassSizes, Placement, declares
from ...planning.notes import note
from ..call.local import LocalCall, LocalOutput
from ..choices.mask_blocks import block_remarks
from ..flash.flash_candidates import flash_candidates, flash_tuned_fields
from ..flash.flash_kernels import FlashKernels
from .hopper_rules import HOPPER_FEATURES, HOPPER_RULES, is_hopper
from .hopper_sizes import FORWARD, candidates_near, columns, fields_of, resolve_hopper, shared_of, tiles_of
from .run_hopper import run_hopper

__all__ = ["HOPPER", "HopperKernels"]

_KERNEL = "attnops_hopper_forward"
_WARPS = 4  # of a warpgroup


class HopperKernels(FlashKernels):
    """attnops' forward kernel for Hopper, written in Mosaic GPU."""

    devices = "Hopper"
    capability = declares(
        consumes=HOPPER_FEATURES,
        rules=HOPPER_RULES,
        # In the interpreter on CPU.
        tolerance={"bfloat16": (2e-2, 4e-2), "float16": (3e-3, 6e-3)},
    )

    def serves(self, problem: Any) -> bool:
        """Hopper; and any device whose config asks for this kernel to be interpreted."""
        asked = self.interpreted(problem.config) and self.read(problem.config).kernel == "mosaic"
        return asked or (is_hopper(problem) and not self.interpreted(problem.config))

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Run the kernels, forward and backward."""
        output, lse = run_hopper(call, self.read(call.config))
        return LocalOutput(output, None, lse if call.return_lse else None)

    def resolve(self, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """Every size, by the head dim, the mask and the local lengths."""
        return resolve_hopper(problem, placement, self.read(problem.config))

    def passes(self, config: OperationConfig, backward: bool) -> tuple[PassSizes, ...]:
        """One kernel forward, in Mosaic; two backward, in Triton."""
        if backward:
            return super().passes(config, True)
        sizes = tiles_of(self.read(config))
        return (PassSizes("forward", sizes.block_q, sizes.block_kv, _KERNEL, warps=_WARPS * sizes.consumers),)

    def memory(
        self, problem: AttentionProblem, placement: Placement, config: OperationConfig
    ) -> Mapping[str, Mapping[str, int]]:
        """Shared memory of a block of threads, by what it holds."""
        del placement
        return {_KERNEL: shared_of(problem, tiles_of(self.read(config)))}

    def tuned_fields(self, problem: AttentionProblem, placement: Placement) -> tuple[str, ...]:
        """The unset sizes."""
        unset = flash_tuned_fields(problem, placement, self.read(problem.config))
        return tuple(name for name in unset if name not in ("num_warps", "kv_splits"))

    def candidates(self, problem: AttentionProblem, placement: Placement) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Sizes around the default choice that fit into shared memory; for the gradients those of the kernels in Triton."""
        config = self.read(problem.config)
        free = [name for name in FORWARD if name in self.tuned_fields(problem, placement)]
        near: dict[tuple[Any, ...], dict[str, Any]] = {}
        for sizes in candidates_near(tiles_of(self.read(self.resolve(problem, placement)))) if free else ():
            fields = {name: size for name, size in fields_of(sizes).items() if name in free}
            try:
                resolve_hopper(problem, placement, config.with_fields(fields))
            except ConfigError:
                continue
            near.setdefault(tuple(fields.items()), fields)
        of_gradients = flash_candidates(problem, placement, config.with_fields({"fold": False, "kv_splits": 1}))
        made = {"forward": tuple(near.values()), "backward": of_gradients.get("backward", ())}
        return {part: found for part, found in made.items() if found}

    def shipped_choice(self, problem: AttentionProblem, placement: Placement) -> tuple[str, Mapping[str, Any]] | None:
        """None is shipped."""
        del problem, placement
        return None

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """A mask's blocks, columns that are added, and which kernels make the gradient."""
        sizes, heads = self.read(config), placement.local.q_heads
        notes = block_remarks(problem, placement, sizes.block_q or 1, sizes.block_kv or 1, heads)
        dims, padded = (problem.head_dim, problem.value_dim), columns(problem)
        if dims != padded:
            notes = (*notes, note("hopper.columns", dims=dims, padded=padded))
        if problem.mode == "__train__":
            notes = (*notes, note("hopper.gradient"))
        return notes


HOPPER = HopperKernels()
