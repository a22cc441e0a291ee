"""Keys that stay split over devices, as for a long cache: each device attends to its part; outputs are merged by their lse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..call.local import LocalCall, LocalOutput
from ..kernels.lse import combine_over_devices

__all__ = ["combined_over_devices"]


def combined_over_devices(call: LocalCall, method: Callable[[LocalCall], LocalOutput]) -> LocalOutput:
    """Run a method on this device's keys, and merge over the axes that split them. A sink is applied once, after that."""
    axes = call.placement.sequence.axes
    result = method(replace(call, sinks=None, return_lse=True))
    assert result.lse is not None
    output, lse = combine_over_devices(result.output, result.lse, axes, call.layout, call.sinks)
    return LocalOutput(output, None, lse if call.return_lse else None)
