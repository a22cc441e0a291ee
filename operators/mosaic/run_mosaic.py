"""A LocalCall through kernels in Mosaic GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from ..call.local import LocalCall
from ..flash.flash_config import FlashAttention2Config
from ..sequence.ring_call import attend_call
from .mosaic_sizes import tiles_of

if TYPE_CHECKING:
    from .kernel.mosaic_attention import PartialMosaic

__all__ = ["run_mosaic"]


def run_mosaic(
    call: LocalCall, config: FlashAttention2Config, kernels: type[PartialMosaic]
) -> tuple[jax.Array, jax.Array]:
    """(output in the call's layout, lse)."""
    kernel = kernels(
        call.layout,
        float(call.softmax_scale),
        call.logits_soft_cap,
        call.problem.platform,
        config.interpret,
        config.residual_checkpoint_name,
        call.problem.value_columns,
        tiles=tiles_of(config),
        fold=bool(config.fold),
        kv_splits=config.kv_splits or 1,
    )
    return attend_call(call, kernel, call.query, call.key, call.value)
