"""Mesh axes that split no work, so that their devices all do the same, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from ..errors import nearest
from ..sharding import FittedRules, MeshAxis, axes_at
from .problem import AttentionProblem

__all__ = ["RepeatedAxis", "repeated_axes", "repeated_lines", "repeated_work"]


class RepeatedAxis(NamedTuple):
    """A mesh axis that splits neither queries nor the keys that a device attends to, so that its devices do the same work.

    splits: the tensors of the call that are nevertheless declared split over it. They are gathered for the work.
    """

    axis: str
    size: int
    splits: tuple[str, ...]
    reason: str
    hint: str


def repeated_axes(problem: AttentionProblem, fitted: FittedRules, working: Set[str]) -> tuple[RepeatedAxis, ...]:
    """The axes of the problem's mesh that are longer than 1 and not in `working`. Manual axes are the caller's and left out."""
    return tuple(
        _repeated(axis, problem, fitted)
        for axis in problem.mesh
        if axis.kind != "manual" and axis.size > 1 and axis.name not in working
    )


def repeated_work(repeated: Sequence[RepeatedAxis]) -> dict[str, Any]:
    """The number of devices that do the same work, and the axes, as JSON-ready values."""
    axes = [axis._asdict() | {"splits": list(axis.splits)} for axis in repeated]
    return {"devices": _devices(repeated), "axes": axes}


def repeated_lines(repeated: Sequence[RepeatedAxis]) -> list[str]:
    """One line per axis: what it splits, how many devices do the same work, why, and the hint."""
    lines = []
    for axis in repeated:
        what = f"{', '.join(axis.splits)} as declared, but no work" if axis.splits else "nothing"
        others = " and ".join(f"{other.axis!r} ({other.size})" for other in repeated if other is not axis)
        beside = f"with {others}, " if others else ""
        lines.append(
            f"mesh axis {axis.axis!r} ({axis.size}) splits {what}: {beside}{_devices(repeated)} devices do the same work; "
            f"{axis.reason}. {axis.hint}."
        )
    return lines


def _devices(repeated: Sequence[RepeatedAxis]) -> int:
    return math.prod(axis.size for axis in repeated)


def _repeated(axis: MeshAxis, problem: AttentionProblem, fitted: FittedRules) -> RepeatedAxis:
    given = [spec for spec in fitted.specs if spec.tensor != "query3d"]
    splits = tuple(
        spec.tensor for spec in given if any(axis.name in spec.axes(index) for index in range(len(spec.shape)))
    )
    if splits:
        reason = f"each device works on all parts of {', '.join(splits)}"
        if axis.name in fitted["key"].axes(problem.layout.index("t")):
            hint = (
                "Declare sequence_parallel='auto' or 'ring', with which each device attends to its own part of the keys"
            )
        else:
            hint = f"Split batch, queries or heads over {axis.name!r}, or take it out of the mesh"
        return RepeatedAxis(axis.name, axis.size, splits, reason, hint)
    drops = [drop for spec in given for drop in spec.dropped if drop.axis == axis.name]
    if drops:
        # Only for the first tensor, which is the query if the axis is declared for it: the others follow it.
        reasons = dict.fromkeys(f"{d.dim} of {d.tensor}: {d.reason}" for d in drops if d.tensor == drops[0].tensor)
        hint = f"Choose sizes that {axis.name!r} divides, split another dimension over it, or take it out of the mesh"
        return RepeatedAxis(axis.name, axis.size, (), ", ".join(reasons), hint)
    named = _named(problem)
    absent = named - {other.name for other in problem.mesh}
    close = "" if axis.name in named else nearest(axis.name, sorted(absent))
    hint = f"{close} Name it in the partition axis, or take it out of the mesh".strip()
    return RepeatedAxis(axis.name, axis.size, (), "no tensor of this call is declared split over it", hint)


def _named(problem: AttentionProblem) -> set[str]:
    """All axes that the rules name, also for tensors that are not in this call."""
    specs = [spec for spec in problem.rules if spec is not None]
    return {axis for spec in specs for index in range(len(spec)) for axis in axes_at(spec, index)}
