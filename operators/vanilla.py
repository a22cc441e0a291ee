"""vanilla: attention in plain XLA. Every feature, every platform; the fallback of the others."""

from __future__ import annotations

from typing import Literal

from ..registry import ALL_FEATURES, OperationConfig, implementation
from .base import Operation
from .kernels.plain import plain_attention
from .local import LocalCall, LocalOutput

__all__ = ["Vanilla", "VanillaConfig"]


class VanillaConfig(OperationConfig):
    """vanilla has nothing to choose."""

    operation: Literal["vanilla"] = "vanilla"


class Vanilla(Operation):
    """Softmax attention written out: logits, cap, bias, mask, sinks, softmax, dropout, values."""

    name = "vanilla"
    config = VanillaConfig

    @implementation(
        consumes=ALL_FEATURES,
        tolerance={
            "float64": (4e-6, 1e-5),  # with the softmax in float32, as it is unless declared otherwise
            "float32": (4e-6, 1e-5),
            "bfloat16": (1.5e-2, 3e-2),
            "float16": (2e-3, 4e-3),
        },
    )
    def forward_native(self, call: LocalCall) -> LocalOutput:
        """Build the logits whole, [batch, heads, q, kv]."""
        batch, heads = call.placement.local.batch, call.placement.local.q_heads
        keep = None
        if call.dropout is not None:
            keep = call.dropout.keep(batch, heads, call.mask.q_len, call.mask.kv_len)
        output, weights, lse = plain_attention(
            call.query,
            call.key,
            call.value,
            layout=call.layout,
            scale=call.softmax_scale,
            mask=call.mask.array(),
            bias=call.bias,
            soft_cap=call.logits_soft_cap,
            sinks=call.sinks,
            keep=keep,
            keep_probability=1.0 - call.problem.dropout_prob,
            softmax_dtype=call.softmax_dtype,
        )
        return LocalOutput(output, weights if call.return_weights else None, lse if call.return_lse else None)
