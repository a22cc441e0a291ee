"""Print a plan: what runs and why, why the others don't, and where every tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from ..planning.cache.cache_plan import CachePlan
from ..planning.decision import WHY
from .cache import print_cache
from .console import Columns, fields, table, text, title

if TYPE_CHECKING:
    from ..verify.report import AnyPlan

__all__ = ["brief_rows", "head_text", "print_plan", "runs_row"]

_STYLES = {"platform": "green", "native": "green", "routed": "green", "fallback": "yellow", "refused": "red"}


def print_plan(
    plan: AnyPlan,
    notes: tuple[str, ...] = (),
    platform_source: str | None = None,
    *,
    cache: CachePlan | None = None,
    verbose: bool = False,
) -> None:
    """Print one screen, or with `verbose` the whole decision, and then the plan of a declared cache: for a step without one, that
    of its layer's group. `platform_source`: where the platform was read from, if not where the plan says."""
    console = text()
    console.print(title(plan.problem.describe()))
    source = f"{plan.problem.platform}, from {platform_source or plan.problem.platform_source}"

    def sourced(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(label, source if label == "platform" else line) for label, line in rows]

    screen = plan.screen("--verbose", notes, verbose)
    console.print(fields([runs_row(plan), *sourced(screen.rows)]))
    if screen.tensors:
        console.print("", _tensors(*screen.tensors), sep="\n")
    if (of_step := cache or plan.cache) is not None:
        console.print()
        print_cache(of_step, arrays=plan.cache is None or bool(screen.tensors))
    if screen.ends:
        console.print("", fields(list(screen.ends)), sep="\n")


def brief_rows(plan: AnyPlan) -> list[tuple[str, str | Text]]:
    """The decision in a few rows."""
    rows: list[tuple[str, str | Text]] = [runs_row(plan), *plan.rejected_rows]
    return [*rows, *plan.brief_rows()]


def runs_row(plan: AnyPlan) -> tuple[str, Text]:
    """What runs, and the kind of decision."""
    name = plan.implementation or "nothing"
    return "runs", Text.assemble((name, f"bold {_STYLES[plan.kind]}"), f" ({WHY[plan.kind]})")


def head_text(described: str) -> Text:
    """The first line of a problem, without its device and mesh: those differ for each target."""
    sizes = described.partition(":")[2].rpartition(", mesh")[0]
    return Text.assemble((described.partition(" on ")[0], "bold"), f":{sizes}")


def _tensors(head: tuple[str, ...], *rows: tuple[str, ...]) -> Columns:
    tensors = table(*head)
    for row in rows:
        cells = [Text(cell, style="dim") if cell == "same" else cell for cell in row]
        tensors.add_row(*cells, style=None if row[-1] else "dim")
    return tensors
