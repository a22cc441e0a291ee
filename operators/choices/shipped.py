"""The tables of block sizes that ship with operations, written by the searches in tools/."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...planning import STATIC_MASKS, AttentionProblem, Placement

__all__ = ["ShippedTable", "table_key"]

# What a config may declare without affecting the choice.
_FREE = frozenset({"operation", "schema_version", "kernel", "residual_checkpoint_name", "interpret"})
# Features that a kernel's sizes don't depend on, or that are in the key as sizes or as the mask.
_SMALL = STATIC_MASKS | {"return_lse", "gqa", "value_dim"}


class ShippedTable(NamedTuple):
    """A table's file, and the fields that a call without a gradient takes from it."""

    path: Path
    forward: tuple[str, ...]

    def look_up(self, problem: AttentionProblem, placement: Placement) -> tuple[str, Mapping[str, Any]] | None:
        """(source, fields) for a problem that declares nothing about blocks; None if there is no row."""
        if problem.config.model_fields_set - _FREE or problem.leaves:
            return None
        data = _table(self.path)
        row = data["choices"].get(table_key(problem, placement))
        if row is None:
            return None
        fields = {name: value for name, value in row.items() if problem.mode == "__train__" or name in self.forward}
        return (f"shipped, found by static clock with {data['compiler']}", fields) if fields else None


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


@functools.cache
def _table(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
