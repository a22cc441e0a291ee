"""A plan as HTML, for notebooks: one screen of text, its mask and its placement."""

from __future__ import annotations

from ..drawing.html import fragment, heading, pictures, rows
from .decision import WHY
from .draw_plan import draw_plan
from .plan_fields import PlanFields
from .plan_text import screen_rows

__all__ = ["plan_html", "plan_pictures"]


def plan_html(plan: PlanFields) -> str:
    """The HTML that a notebook shows for a plan."""
    runs = ("runs", f"{plan.implementation or 'nothing'} ({WHY[plan.kind]})")
    facts = rows([runs, *screen_rows(plan)])
    return fragment([heading(plan.problem.describe()), facts, pictures(plan_pictures(plan))])


def plan_pictures(plan: PlanFields) -> list[str]:
    """The plan's mask and, on a mesh, its placement, as SVG."""
    problem = plan.problem
    mask = problem.mask.draw(problem.q_len, problem.kv_len, query_offset=problem.query_offset or 0)
    return [mask.svg()] + ([draw_plan(plan, None).svg()] if problem.devices > 1 else [])
