"""A plan on the terminal: what runs and why, why not the others, where every tensor lives."""

from __future__ import annotations

from rich.text import Text

from ..planning import Plan
from ..planning.paged.paged_plan import PagedPlan
from ..planning.plan import dropped_lines, tensor_rows
from ..planning.repeated import repeated_lines
from ..planning.text import bytes_text
from .console import fields, table, text

__all__ = ["brief_rows", "placement_rows", "print_plan", "rejected_rows", "runs_row"]

_WHY = {
    "platform": ("the platform's own implementation", "green"),
    "native": ("dispatch: nothing better is written for this platform", "green"),
    "routed": ("dispatch: the platform's own implementation leaves such calls to it", "green"),
    "fallback": ("FALLBACK: the platform's own implementation refused", "yellow"),
    "refused": ("REFUSED: no implementation may run this", "red"),
}


def print_plan(plan: Plan, notes: tuple[str, ...] = (), platform_source: str | None = None) -> None:
    """The whole decision. `platform_source` says where the platform was read if not where the plan says."""
    console = text()
    problem = plan.problem
    console.print(Text(problem.describe(), style="bold"))
    rows: list[tuple[str, str | Text]] = [runs_row(plan), *rejected_rows(plan)]
    rows.append(("platform", f"{problem.platform}, from {platform_source or problem.platform_source}"))
    rows.append(("mask", problem.mask.describe()))
    rows.append(("scale", f"{problem.softmax_scale:.6g}, softmax in {problem.softmax_dtype}"))
    if problem.logits_soft_cap is not None:
        rows.append(("soft cap", f"{problem.logits_soft_cap:g}"))
    if problem.dropout_prob > 0:
        rows.append(("dropout", f"{problem.dropout_prob:g}"))
    if plan.method is not None and plan.operation.reads_config(plan.method):
        rows += [("config", line) for line in plan.config_lines()]
    if plan.tuning is not None:
        rows.append(("tuning", f"{plan.tuning.source}: {plan.tuning.why}"))
    if plan.padding is not None:
        pad = plan.padding
        waste = f"{pad.waste:.1%} of the work is on padding"
        rows.append(("padding", f"per device q +{pad.q_len}, kv +{pad.kv_len}: {waste}"))
    console.print(fields(rows), "", sep="\n")
    _print_tensors(plan)
    rows = [*placement_rows(plan, brief=False), *[("note", note) for note in (*plan.notes, *notes)]]
    if rows:
        console.print("", fields(rows), sep="\n")


def brief_rows(plan: Plan) -> list[tuple[str, str | Text]]:
    """The decision in a few lines."""
    rows: list[tuple[str, str | Text]] = [runs_row(plan), *rejected_rows(plan)]
    fitted = plan.placement.fitted
    query = fitted.get("query")
    if query is not None and plan.problem.devices > 1:
        shape = "x".join(map(str, query.local_shape))
        rows.append(("device", f"query {shape} ({bytes_text(query.local_bytes)}) on each of {plan.problem.devices}"))
    return [*rows, *placement_rows(plan)]


def placement_rows(plan: Plan, *, brief: bool = True) -> list[tuple[str, str]]:
    """Mesh axes that are dropped, those over which work is repeated, and where tensors are elsewhere inside the operation."""
    rows = [("dropped", line) for line in dropped_lines(plan, brief=brief)]
    rows += [("repeated", line) for line in repeated_lines(plan.placement.repeated)]
    return rows + [("inside", change) for change in plan.placement.changes]


def runs_row(plan: Plan | PagedPlan) -> tuple[str, Text]:
    """What runs, and the kind of decision."""
    why, style = _WHY[plan.kind]
    return "runs", Text.assemble((plan.implementation or "nothing", f"bold {style}"), f" ({why})")


def rejected_rows(plan: Plan | PagedPlan) -> list[tuple[str, str]]:
    """Every reason against the others."""
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
