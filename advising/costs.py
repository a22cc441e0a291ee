"""PlanCosts: what a planned call costs on a machine, however its mesh lies on the links."""

from __future__ import annotations

from typing import NamedTuple

from ..planning.traffic import Need
from .compute_time import ComputeTime

__all__ = ["PassCost", "PlanCosts"]


class PassCost(NamedTuple):
    """One pass on its own: the work, what it sends, and why some of that is unknown. steps: the hops of a ring, at least 1."""

    name: str
    done: ComputeTime
    needs: tuple[Need, ...]
    unknown: tuple[str, ...]
    steps: int = 1


class PlanCosts(NamedTuple):
    """All passes, and bytes on a device: operands and results, which are exact, and what the strategy holds besides, about."""

    passes: tuple[PassCost, ...]
    argument_bytes: int
    output_bytes: int
    held_bytes: int
