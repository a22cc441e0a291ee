"""A LocalCall through the GPU kernels."""

from __future__ import annotations

import jax

from ..local import LocalCall
from ..sequence.ring_call import around_the_ring
from .flash_config import FlashAttention2Config
from .flash_sizes import sizes_of, steps_of

__all__ = ["run_flash"]


def run_flash(call: LocalCall, config: FlashAttention2Config) -> tuple[jax.Array, jax.Array]:
    """(output in the call's layout, lse)."""
    from ..kernels.flash import (
        FlashPart,
        FlashSizes,
        PassSizes,
        Steps,
        flash_attention,
    )  # imports Pallas, so only where they run

    passes = {name: PassSizes(*sizes) for name, sizes in sizes_of(config).items()}
    steps = Steps(**steps_of(call.problem, config)._asdict())
    sizes = FlashSizes(**passes, kv_splits=config.kv_splits or 1, fold=bool(config.fold), steps=steps)
    if call.ring is not None:
        kernel = FlashPart(
            call.layout,
            call.softmax_scale,
            call.logits_soft_cap,
            sizes,
            call.problem.platform,
            config.interpret,
            config.residual_checkpoint_name,
        )
        return around_the_ring(call, kernel, call.query, call.key, call.value)
    return flash_attention(
        call.query,
        call.key,
        call.value,
        layout=call.layout,
        scale=call.softmax_scale,
        mask=call.mask,
        bias=call.bias,
        soft_cap=call.logits_soft_cap,
        sinks=call.sinks,
        key_scale=call.key_scale,
        value_scale=call.value_scale,
        dropout=call.dropout,
        sizes=sizes,
        residual_checkpoint_name=config.residual_checkpoint_name,
        platform=call.problem.platform,
        interpret=config.interpret,
    )
