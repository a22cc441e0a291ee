"""The plan of a declared KV cache on the terminal, and the note of commands that don't read one."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from ..planning.cache.cache_plan import CachePlan, array_rows, fact_rows
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..sharding import devices_platform
from .console import fields, table, text
from .enabled import enabled_json
from .json_output import print_json

__all__ = ["cache_notes", "noted", "plan_cache", "print_cache", "show_cache"]

_CALL_ALONE = "the file declares a cache, which `attnops plan` plans; this is the call alone"


def plan_cache(declaration: Declaration, metadata: OperationMetadata) -> CachePlan | None:
    """The cache's plan on the metadata's mesh and platform; None where no cache is declared."""
    if declaration.cache is None:
        return None
    kind = None if devices_platform(metadata.mesh) else metadata.backend or metadata.platform
    return declaration.cache.plan(metadata.mesh, kv_heads=metadata.policy.kv_heads, device_kind=kind)


def print_cache(plan: CachePlan, notes: tuple[str, ...] = (), *, arrays: bool = True) -> None:
    """The whole plan, or without the table of its arrays; `notes` are those of its file."""
    console = text()
    console.print(Text(plan.describe(), style="bold"))
    refused = Text("REFUSED: the cache can't be made so", style="bold red")
    rows: list[tuple[str, str | Text]] = [("cache", refused)] if plan.refused else []
    console.print(fields([*rows, *fact_rows(plan), *[("note", note) for note in notes]]))
    if not arrays:
        return
    console.print()
    shown = table("array", "fitted", "shape", "per device", "bytes")
    for row in array_rows(plan):
        shown.add_row(*row)
    console.print(shown)


def show_cache(plan: CachePlan, notes: tuple[str, ...], as_json: bool) -> None:
    """The plan of a file that declares a cache, and neither a call nor a step. Errors: RefusedError, once it is shown."""
    if as_json:
        print_json(enabled_json({"cache": plan.to_dict()}, notes))
    else:
        print_cache(plan, notes)
    plan.require()


def cache_notes(declaration: Declaration) -> tuple[str, ...]:
    """For commands that compile or run the call."""
    return () if declaration.cache is None or declaration.step is not None else (_CALL_ALONE,)


def noted(data: dict[str, Any], notes: tuple[str, ...]) -> dict[str, Any]:
    """JSON of a report with these among its notes."""
    return data | ({"notes": [*data.get("notes", ()), *notes]} if notes else {})
