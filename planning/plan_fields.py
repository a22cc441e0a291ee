"""PlanFields: the decision about a call, as data. Plan adds text, pictures and JSON."""

from __future__ import annotations

from dataclasses import dataclass

from .decision import Decision
from .placement import Placement
from .problem import AttentionProblem

__all__ = ["PlanFields"]


@dataclass(frozen=True, eq=False, repr=False)
class PlanFields(Decision[AttentionProblem, Placement]):
    """The fields of Plan, which documents them."""
