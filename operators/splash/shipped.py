"""The shipped choices of block sizes: shipped.json, written by tools/block_table.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...planning import STATIC_MASKS, AttentionProblem, Placement
from .candidates import FORWARD
from .splash_config import SplashConfig

__all__ = ["TABLE", "look_up", "table_key"]

TABLE = Path(__file__).with_name("shipped.json")
# What a config may declare without affecting the choice.
_FREE = frozenset({"operation", "schema_version", "kernel", "residual_checkpoint_name", "interpret"})
# Features that a kernel's sizes don't depend on, or that are in the key as sizes or as the mask.
_SMALL = STATIC_MASKS | {"return_lse", "gqa", "value_dim"}


def table_key(problem: AttentionProblem, placement: Placement) -> str:
    """The table's key: batch and heads don't matter to a tile of one head."""
    local = placement.local
    parts = (
        problem.device_kind,
        problem.runtime_dtype,
        *(f"{name} {dtype}" for name, dtype in problem.quantised.items()),
        f"q {local.q_len}",
        f"kv {local.kv_len}",
        f"dim {problem.head_dim}",
        f"value {problem.value_dim}",
        problem.mask.describe(),
        *sorted(problem.features - _SMALL),
    )
    return ", ".join(parts)


def look_up(problem: AttentionProblem, placement: Placement) -> tuple[str, Mapping[str, Any]] | None:
    """(source, fields) for a problem that declares nothing about blocks; None if there is no row."""
    config = problem.config
    if not isinstance(config, SplashConfig) or config.kernel != "attnops":
        return None  # the sizes are those of attnops' kernels
    if config.model_fields_set - _FREE or problem.leaves:
        return None
    data = _table()
    row = data["choices"].get(table_key(problem, placement))
    if row is None:
        return None
    fields = {name: value for name, value in row.items() if problem.mode == "__train__" or name in FORWARD}
    return f"shipped, found by static clock with {data['compiler']}", fields


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))
