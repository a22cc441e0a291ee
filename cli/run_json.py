"""`attnops run --json`: what was run, as JSON values."""

from __future__ import annotations

import math
from typing import Any

from .compared import Compared
from .ran import Ran, main_result

__all__ = ["ran_json"]


def ran_json(ran: Ran, notes: tuple[str, ...]) -> dict[str, Any]:
    """The plan, the output's shape, times in seconds, memory in bytes, the checks, and for a call the comparison."""
    name, output = main_result(ran.output)
    data = {
        "plan": ran.plan.to_dict(),
        name: {"shape": list(output.shape), "dtype": output.dtype.name, "finite": not ran.unsound},
        "time": {
            "seconds": ran.seconds[0],
            "repeats": ran.repeats,
            "compile_seconds": ran.compiled.compile_seconds,
            "temporary_bytes": ran.compiled.temp_bytes,
        },
        "checks": [
            {name: _number(value) for name, value in check._asdict().items()} | {"passed": check.passed}
            for check in ran.checks
        ],
        "notes": list(notes),
    }
    return data if ran.compared is None else data | {"compare": _compared(ran, ran.compared)}


def _compared(ran: Ran, other: Compared) -> dict[str, Any]:
    """The result of jax.nn.dot_product_attention for the same work, or why there is none."""
    if other.compiled is None:
        return {"expressible": other.expressible, "reason": other.reason or "not asked for"}
    return {
        "expressible": True,
        "mask": other.mask,
        "seconds": ran.seconds[-1],
        "temporary_bytes": other.compiled.temp_bytes,
        "agreement": other.agreement,
    }


def _number(value: Any) -> Any:
    """JSON has no infinity: an infinite error is written as a string."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
