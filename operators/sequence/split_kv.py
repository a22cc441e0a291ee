"""Keys that stay split over devices, as for a long cache: each device attends to its part; outputs are merged by their lse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from ..kernels.lse import divisor, log_of_sum, shift_of
from ..local import LocalCall, LocalOutput, by_row

__all__ = ["merged_over_devices"]


def merged_over_devices(call: LocalCall, method: Callable[[LocalCall], LocalOutput]) -> LocalOutput:
    """Run a method on this device's keys, and merge over the axes that split them. A sink is applied once, after that."""
    axes = call.placement.sequence.axes
    result = method(replace(call, sinks=None, return_lse=True))
    assert result.lse is not None
    lse = result.lse
    sinks = None if call.sinks is None else call.sinks[None, :, None].astype(lse.dtype)
    greatest = lax.pmax(lax.stop_gradient(lse), axes)
    shift = shift_of(greatest) if sinks is None else shift_of(greatest, sinks)
    share = jnp.exp(lse - shift)
    total = lax.psum(share, axes)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    weighted = lax.psum(result.output.astype(lse.dtype) * by_row(share, call.layout), axes)
    output = (weighted / by_row(divisor(total), call.layout)).astype(result.output.dtype)
    return LocalOutput(output, None, log_of_sum(total, shift) if call.return_lse else None)
