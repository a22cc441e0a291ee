"""A LocalCall through the GPU kernels."""

from __future__ import annotations

import jax

from ..local import LocalCall
from ..sequence.ring_call import attend_call
from .flash_config import FlashAttention2Config
from .flash_sizes import sizes_of, steps_of

__all__ = ["run_flash"]


def run_flash(call: LocalCall, config: FlashAttention2Config) -> tuple[jax.Array, jax.Array]:
    """(output in the call's layout, lse)."""
    # It imports Pallas, so only where the kernels run.
    from ..kernels.flash import FlashPart, FlashSizes, PassSizes, Steps

    passes = {name: PassSizes(*sizes) for name, sizes in sizes_of(config).items()}
    steps = Steps(**steps_of(call.problem, config)._asdict())
    kernel = FlashPart(
        call.layout,
        float(call.softmax_scale),
        call.logits_soft_cap,
        FlashSizes(**passes, kv_splits=config.kv_splits or 1, fold=bool(config.fold), steps=steps),
        call.problem.platform,
        config.interpret,
        config.residual_checkpoint_name,
    )
    return attend_call(call, kernel, call.query, call.key, call.value)
