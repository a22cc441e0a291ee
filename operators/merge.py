"""Keys that stay split over devices, as a long cache does: each device attends to its part; outputs are merged by their lse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from .local import LocalCall, LocalOutput, by_row

__all__ = ["merged_over_devices"]


def merged_over_devices(call: LocalCall, method: Callable[[LocalCall], LocalOutput]) -> LocalOutput:
    """Run a method on this device's keys, and merge over the axes that split them. A sink counts once, after that."""
    axes = call.placement.sequence.axes
    result = method(replace(call, sinks=None, return_lse=True))
    assert result.lse is not None
    lse = result.lse
    sinks = None if call.sinks is None else call.sinks[None, :, None].astype(lse.dtype)
    peak = lax.pmax(lax.stop_gradient(lse), axes)
    if sinks is not None:
        peak = jnp.maximum(peak, lax.stop_gradient(sinks))
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    share = jnp.exp(lse - peak)
    total = lax.psum(share, axes)
    if sinks is not None:
        total = total + jnp.exp(sinks - peak)
    safe = jnp.where(total == 0, 1, total)
    output = lax.psum(result.output.astype(lse.dtype) * by_row(share, call.layout), axes) / by_row(safe, call.layout)
    merged = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
    return LocalOutput(output.astype(result.output.dtype), None, merged if call.return_lse else None)
