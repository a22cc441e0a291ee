"""Print the plan of a declared KV cache."""

from __future__ import annotations

from rich.text import Text

from ..planning.cache.cache_plan import CachePlan, array_rows, fact_rows
from ..registry import OperationMetadata
from ..registry.declaration import Declaration
from ..sharding import devices_platform
from .console import fields, table, text, title
from .file_notes import enabled_notes, noted
from .json_output import print_json

__all__ = ["plan_cache", "print_cache", "show_cache"]


def plan_cache(declaration: Declaration, metadata: OperationMetadata) -> CachePlan | None:
    """The cache's plan on the metadata's mesh and platform, or None if no cache is declared."""
    if declaration.cache is None:
        return None
    kind = None if devices_platform(metadata.mesh) else metadata.backend or metadata.platform
    return declaration.cache.plan(metadata.mesh, kv_heads=metadata.policy.kv_heads, device_kind=kind)


def print_cache(plan: CachePlan, notes: tuple[str, ...] = (), *, arrays: bool = True) -> None:
    """Print the plan, with or without the table of its arrays. `notes` are those of the file."""
    console = text()
    console.print(title(plan.describe()))
    refused = Text("REFUSED: this cache can't be created", style="bold red")
    rows: list[tuple[str, str | Text]] = [("cache", refused)] if plan.refused else []
    console.print(fields([*rows, *fact_rows(plan), *[("note", note) for note in notes]]))
    if not arrays:
        return
    console.print()
    shown = table("array", "fitted", "shape", "per device", "bytes")
    for row in array_rows(plan):
        shown.add_row(*row)
    console.print(shown)


def show_cache(plan: CachePlan, declaration: Declaration, as_json: bool) -> None:
    """Print the plan of a file that declares only a cache. Errors: RefusedError, after the plan is printed."""
    notes = enabled_notes(declaration)
    if as_json:
        print_json(noted({"cache": plan.to_dict()}, declaration, notes))
    else:
        print_cache(plan, notes)
    plan.require()
