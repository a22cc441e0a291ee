"""`attnops run --json`: what was run, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from ..planning import Plan
from ..planning.paged.paged_plan import PagedPlan
from .check import Comparison
from .compared import Compared
from .run_call import Compiled

__all__ = ["compared_json", "ran_json"]


def ran_json(
    plan: Plan | PagedPlan,
    output: jax.Array,
    unsound: str,
    compiled: Compiled,
    seconds: float,
    repeats: int,
    checks: Sequence[Comparison],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The plan, the output's shape, times in seconds, memory in bytes, and the checks."""
    return {
        "plan": plan.to_dict(),
        "output": {"shape": list(output.shape), "dtype": output.dtype.name, "finite": not unsound},
        "time": {
            "seconds": seconds,
            "repeats": repeats,
            "compile_seconds": compiled.compile_seconds,
            "temporary_bytes": compiled.temp_bytes,
        },
        "checks": [
            {name: _number(value) for name, value in check._asdict().items()} | {"passed": check.passed}
            for check in checks
        ],
        "notes": list(notes),
    }


def compared_json(other: Compared, seconds: float | None, agreement: str) -> dict[str, Any]:
    """The result of jax.nn.dot_product_attention for the same work, or why there is none."""
    if other.compiled is None:
        return {"expressible": other.expressible, "reason": other.reason or "not asked for"}
    return {
        "expressible": True,
        "mask": other.mask,
        "seconds": seconds,
        "temporary_bytes": other.compiled.temp_bytes,
        "agreement": agreement,
    }


def _number(value: Any) -> Any:
    """JSON has no infinity: an infinite error is written as a string."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
