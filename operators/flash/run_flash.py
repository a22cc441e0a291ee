"""A LocalCall through the GPU kernels."""

from __future__ import annotations

import jax

from ..call.local import LocalCall
from ..sequence.ring_call import attend_call
from .flash_config import FlashAttention2Config
from .flash_sizes import sizes_of, steps_of
from .kernel.flash_sizes import FlashSizes

__all__ = ["run_flash"]


def run_flash(call: LocalCall, config: FlashAttention2Config) -> tuple[jax.Array, jax.Array]:
    """(output in the call's layout, lse)."""
    from .kernel.flash_attention import PartialFlash  # imports Pallas, so only where the kernels run

    splits, steps = config.kv_splits or 1, steps_of(call.problem, config)
    kernel = PartialFlash(
        call.layout,
        float(call.softmax_scale),
        call.logits_soft_cap,
        call.problem.platform,
        config.interpret,
        config.residual_checkpoint_name,
        call.problem.value_columns,
        sizes=FlashSizes(**sizes_of(config), kv_splits=splits, fold=bool(config.fold), steps=steps),
    )
    return attend_call(call, kernel, call.query, call.key, call.value)
