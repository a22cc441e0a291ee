"""Print a plan: what runs and why, why the others don't, and where every tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..planning import Plan
from ..planning.cache.cache_plan import CachePlan
from ..planning.decision import WHY, Decision
from ..planning.notes import is_info
from ..planning.plan_text import decision_rows, placement_rows, screen_rows, tensor_rows
from ..planning.tables.fitted_plan import FittedPlan
from .cache import print_cache
from .console import Columns, fields, table, text, title

if TYPE_CHECKING:
    from ..verify.report import AnyPlan

__all__ = ["brief_rows", "head_text", "print_plan", "rejected_rows", "runs_row"]

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

    rows: list[tuple[str, str | Text]] = [runs_row(plan)]
    if isinstance(plan, FittedPlan):
        printed = [note for note in (*plan.notes, *notes) if verbose or not is_info(note)]
        rows += [*rejected_rows(plan), *sourced(plan.rows(verbose)), *[("note", note) for note in printed]]
        console.print(fields(rows))
        shows_arrays = verbose or not plan.on_one_device
        if shows_arrays:
            console.print("", _fitted_tensors(plan), sep="\n")
        if (of_step := cache or plan.cache) is not None:
            console.print()
            print_cache(of_step, arrays=shows_arrays)
        if not verbose:
            asides = len(plan.notes) + len(notes) - len(printed)
            left_out = [
                "defaults of the config",
                *([] if shows_arrays else ["arrays"]),
                *([f"{asides} notes"] if asides else []),
            ]
            console.print("", fields([("more", f"--verbose adds {', '.join(left_out)}")]), sep="\n")
        return
    if verbose:
        rows += rejected_rows(plan)
        for label, line in sourced(decision_rows(plan)):
            rows += [(label, config_line) for config_line in (plan.config_lines() if label == "config" else [line])]
        console.print(fields(rows), "", _tensors(plan), sep="\n")
        ends = [*placement_rows(plan, brief=False), *[("note", note) for note in (*plan.notes, *notes)]]
        if ends:
            console.print("", fields(ends), sep="\n")
    else:
        console.print(fields([*rows, *sourced(screen_rows(plan, notes, "--verbose"))]))
    if cache is not None:
        console.print()
        print_cache(cache)


def brief_rows(plan: AnyPlan) -> list[tuple[str, str | Text]]:
    """The decision in a few rows."""
    rows: list[tuple[str, str | Text]] = [runs_row(plan), *rejected_rows(plan)]
    return [*rows, *plan.brief_rows()]


def runs_row(plan: AnyPlan) -> tuple[str, Text]:
    """What runs, and the kind of decision."""
    name = plan.implementation or "nothing"
    return "runs", Text.assemble((name, f"bold {_STYLES[plan.kind]}"), f" ({WHY[plan.kind]})")


def head_text(described: str) -> Text:
    """The first line of a problem, without its device and mesh: those differ for each target."""
    sizes = described.partition(":")[2].rpartition(", mesh")[0]
    return Text.assemble((described.partition(" on ")[0], "bold"), f":{sizes}")


def rejected_rows(plan: Decision[Any, Any]) -> list[tuple[str, str]]:
    """Every reason why the others don't run."""
    rows = []
    for rejected in plan.rejected:
        rows += [("not", f"{rejected.implementation}: {reason}") for reason in rejected.reasons]
    return rows


def _tensors(plan: Plan) -> Columns:
    tensors = table("tensor", "declared", "fitted", "shape", "per device", "bytes")
    for name, declared, fitted, shape, local, size in tensor_rows(plan):
        if shape:
            fitted_text = Text("same", style="dim") if declared == fitted else Text(fitted)
            tensors.add_row(name, declared, fitted_text, shape, local, size)
        else:
            tensors.add_row(name, declared, Text(fitted, style="dim"), style="dim")
    return tensors


def _fitted_tensors(plan: FittedPlan[Any, Any]) -> Columns:
    tensors = table("tensor", "fitted", "shape", "per device", "bytes")
    for row in plan.tensor_rows():
        tensors.add_row(*row)
    return tensors
