"""Print a plan: what runs and why, why the others don't, and where every tensor is."""

from __future__ import annotations

from rich.text import Text

from ..planning import Plan
from ..planning.decision import WHY
from ..planning.paged.paged_plan import PagedPlan
from ..planning.plan_text import decision_rows, placement_rows, screen_rows, tensor_rows
from ..planning.text import bytes_text
from .console import fields, table, text, title

__all__ = ["brief_rows", "head_text", "print_plan", "rejected_rows", "runs_row"]

_STYLES = {"platform": "green", "native": "green", "routed": "green", "fallback": "yellow", "refused": "red"}


def print_plan(
    plan: Plan, notes: tuple[str, ...] = (), platform_source: str | None = None, *, verbose: bool = False
) -> None:
    """Print one screen, or with `verbose` the whole decision. `platform_source`: where the platform was read from, if not where
    the plan says."""
    console = text()
    console.print(title(plan.problem.describe()))
    source = f"{plan.problem.platform}, from {platform_source or plan.problem.platform_source}"

    def sourced(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(label, source if label == "platform" else line) for label, line in rows]

    if not verbose:
        console.print(fields([runs_row(plan), *sourced(screen_rows(plan, notes, "--verbose"))]))
        return
    rows: list[tuple[str, str | Text]] = [runs_row(plan), *rejected_rows(plan)]
    for label, line in sourced(decision_rows(plan)):
        rows += [(label, one) for one in (plan.config_lines() if label == "config" else [line])]
    console.print(fields(rows), "", sep="\n")
    _print_tensors(plan)
    told = [*placement_rows(plan, brief=False), *[("note", note) for note in (*plan.notes, *notes)]]
    if told:
        console.print("", fields(told), sep="\n")


def brief_rows(plan: Plan) -> list[tuple[str, str | Text]]:
    """The decision in a few rows."""
    rows: list[tuple[str, str | Text]] = [runs_row(plan), *rejected_rows(plan)]
    fitted = plan.placement.fitted
    query = fitted.get("query")
    if query is not None and plan.problem.devices > 1:
        shape = "x".join(map(str, query.local_shape))
        rows.append(("device", f"query {shape} ({bytes_text(query.local_bytes)}) on each of {plan.problem.devices}"))
    return [*rows, *placement_rows(plan)]


def runs_row(plan: Plan | PagedPlan) -> tuple[str, Text]:
    """What runs, and the kind of decision."""
    name = plan.implementation or "nothing"
    return "runs", Text.assemble((name, f"bold {_STYLES[plan.kind]}"), f" ({WHY[plan.kind]})")


def head_text(described: str) -> Text:
    """The first line of a problem, without its device and mesh: those differ for each target."""
    sizes = described.partition(":")[2].rpartition(", mesh")[0]
    return Text.assemble((described.partition(" on ")[0], "bold"), f":{sizes}")


def rejected_rows(plan: Plan | PagedPlan) -> list[tuple[str, str]]:
    """Every reason why the others don't run."""
    rows = []
    for rejected in plan.rejected:
        rows += [("not", f"{rejected.implementation}: {reason}") for reason in rejected.reasons]
    return rows


def _print_tensors(plan: Plan) -> None:
    tensors = table("tensor", "declared", "fitted", "shape", "per device", "bytes")
    for name, declared, fitted, shape, local, size in tensor_rows(plan):
        if shape:
            kept = Text("same", style="dim") if declared == fitted else Text(fitted)
            tensors.add_row(name, declared, kept, shape, local, size)
        else:
            tensors.add_row(name, declared, Text(fitted, style="dim"), style="dim")
    text().print(tensors)
