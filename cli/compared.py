"""The same work with jax.nn.dot_product_attention, for `attnops run`: compiled if it can be expressed and fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..planning import Plan
from ..planning.text import bytes_text
from .baseline import NotExpressible, baseline
from .run_call import Compiled, TooLarge, compile_call

__all__ = ["Compared", "compare"]


class Compared(NamedTuple):
    """`compiled`, with how its mask is passed to it, or the `reason` why there is nothing to compare with."""

    compiled: Compiled | None
    mask: str
    expressible: bool
    reason: str


def compare(plan: Plan, arrays: Mapping[str, Any]) -> Compared:
    """Compile the call in terms of jax.nn and run it once, unless its temporary memory doesn't fit into what is free."""
    other = baseline(plan, arrays)
    if isinstance(other, NotExpressible):
        return Compared(None, "", False, other.reason)
    devices = jax.tree.leaves(arrays["query"])[0].sharding.device_set
    free = _free_bytes(next(iter(devices)), len(devices))
    try:
        return Compared(compile_call(other.function, other.arguments, most=free), other.mask, True, "")
    except TooLarge as error:
        wants = f"needs {bytes_text(error.bytes)} of temporary memory per device"
        return Compared(None, other.mask, True, f"{wants}, and {bytes_text(free or 0)} are free")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compared(None, other.mask, True, "doesn't fit into the device's memory")


def _free_bytes(device: jax.Device, count: int) -> int | None:
    """Free memory of a device; None if that isn't known. CPU devices share the machine's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 // count if found and device.platform == "cpu" else None
