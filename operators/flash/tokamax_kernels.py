"""tokamax's kernels for GPUs as an implementation, which a config of flash_attn2 may name."""

from __future__ import annotations

from ...errors import ConfigError
from ...planning import AttentionProblem, Implementation, OperationConfig, Placement, declares
from ..call.local import LocalCall, LocalOutput
from ..kernels.library_attention import library_mask
from ..notes.precision_notes import default_precision_notes
from .flash_config import FlashAttention2Config
from .tokamax_rules import (
    KEYS_WANTED,
    TOKAMAX_FEATURES,
    TOKAMAX_RULES,
    keys_to_pad,
    local_flags,
    tokamax_notes,
)

__all__ = ["TokamaxKernels"]


class TokamaxKernels(Implementation[FlashAttention2Config]):
    """tokamax.dot_product_attention with its kernels in Mosaic GPU; it chooses its sizes itself."""

    operation = "flash_attn2"
    config = FlashAttention2Config
    capability = declares(
        consumes=TOKAMAX_FEATURES,
        rules=TOKAMAX_RULES,
        # Of its function in XLA, on a CPU.
        tolerance={"float32": (4e-6, 1e-5), "bfloat16": (2e-2, 4e-2), "float16": (4e-3, 8e-3)},
    )

    def __call__(self, call: LocalCall) -> LocalOutput:
        """Run the kernels, forward and backward."""
        from .kernel.tokamax_attention import tokamax_attention

        call = call.with_hidden_keys_zero()
        flags = local_flags(call.problem, call.placement)
        is_causal, window = flags or (False, None)
        swap = call.layout == "bhtd"
        query, key, value = (x.swapaxes(1, 2) if swap else x for x in (call.query, call.key, call.value))
        output = tokamax_attention(
            query,
            key,
            value,
            library_mask(call.mask, call.bias, flags is not None),
            scale=float(call.softmax_scale),
            soft_cap=call.logits_soft_cap,
            is_causal=is_causal,
            window=window,
            interpret=self.read(call.config).interpret,
        )
        return LocalOutput(output.swapaxes(1, 2) if swap else output)

    def resolve(self, problem: AttentionProblem, placement: Placement) -> OperationConfig:
        """The config as it is. Errors: ConfigError for rows of a mask on a device whose array the gradient can't take."""
        if keys_to_pad(problem, local_flags(problem, placement)):
            raise ConfigError(
                f"FlashAttention2Config: kernel='tokamax' and kv_len={problem.kv_len}: {KEYS_WANTED}, and a device has "
                "some rows of the mask. Hint: pad the keys, or leave kernel out."
            )
        return problem.config

    def check_vma(self, config: OperationConfig) -> bool:
        """It can't."""
        return False

    def notes(self, problem: AttentionProblem, placement: Placement, config: OperationConfig) -> tuple[str, ...]:
        """An untried version, what a mask's array takes, and jax's precision of products."""
        return (*tokamax_notes(problem, placement, self.read(config)), *default_precision_notes(problem))
