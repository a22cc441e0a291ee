"""A LocalCall through the Hopper kernels."""

from __future__ import annotations

import jax

from ..call.local import LocalCall
from ..flash.flash_config import FlashAttention2Config
from ..sequence.ring_call import attend_call
from .hopper_sizes import tiles_of

__all__ = ["run_hopper"]


def run_hopper(call: LocalCall, config: FlashAttention2Config) -> tuple[jax.Array, jax.Array]:
    """(output in the call's layout, lse)."""
    from .kernel.hopper_attention import PartialHopper  # imports Pallas, so only where the kernels run

    kernel = PartialHopper(
        call.layout,
        float(call.softmax_scale),
        call.logits_soft_cap,
        call.problem.platform,
        config.interpret,
        config.residual_checkpoint_name,
        tiles=tiles_of(config),
    )
    return attend_call(call, kernel, call.query, call.key, call.value)
