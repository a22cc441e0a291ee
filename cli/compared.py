"""The same work with jax.nn.dot_product_attention, for `attnops run`: compiled if it can be expressed and fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..planning import Plan
from ..planning.text import bytes_text
from .baseline import NotExpressible, baseline
from .materials import canonical
from .run_call import Compiled, TooLarge, compile_call

__all__ = ["Compared", "compare"]


class Compared(NamedTuple):
    """`compiled`, with how its mask is passed to it, or the `reason` why there is nothing to compare with. agreement: how much
    the two results differ."""

    compiled: Compiled | None
    mask: str
    expressible: bool
    reason: str
    agreement: str = ""


def compare(plan: Plan, arrays: Mapping[str, Any], output: Any) -> Compared:
    """Compile the call in terms of jax.nn, run it once, and compare the result with `output`; unless its temporary memory
    doesn't fit into what is free."""
    other = baseline(plan, arrays)
    if isinstance(other, NotExpressible):
        return Compared(None, "", False, other.reason)
    devices = jax.tree.leaves(arrays["query"])[0].sharding.device_set
    free = _free_bytes(next(iter(devices)), len(devices))
    try:
        compiled = compile_call(other.function, other.arguments, max_bytes=free)
    except TooLarge as error:
        wants = f"needs {bytes_text(error.bytes)} of temporary memory per device"
        return Compared(None, other.mask, True, f"{wants}, and {bytes_text(free or 0)} are free")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compared(None, other.mask, True, "doesn't fit into the device's memory")
    return Compared(compiled, other.mask, True, "", _agreement(plan, output, compiled.result))


def _agreement(plan: Plan, output: Any, output_of_jax: Any) -> str:
    """How much the other result differs. Fully masked rows are left out: they are 0 here, and the mean of the values there."""
    problem = plan.problem
    values = canonical(np.asarray(output.attention_outputs, np.float32), problem.layout)
    other_values = np.asarray(output_of_jax, np.float32)
    visible: np.ndarray = np.ones(values.shape[:-1], bool)
    if problem.mask.may_have_dead_rows(problem.q_len, problem.kv_len):
        visible = np.asarray(values.any(axis=-1))
    values, other_values = values[visible], other_values[visible]
    finite = np.isfinite(values) & np.isfinite(other_values)
    text = f"differs by at most {float(np.abs(values[finite] - other_values[finite]).max(initial=0.0)):.1e}"
    text += "" if visible.all() else f", {int((~visible).sum())} fully masked rows left out"
    return text if finite.all() else f"{text}, {int((~finite).sum())} values that are not finite left out"


def _free_bytes(device: jax.Device, count: int) -> int | None:
    """Free memory of a device; None if that isn't known. CPU devices share the machine's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 // count if available and device.platform == "cpu" else None
