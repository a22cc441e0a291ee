"""Mesh axes that split no work, so that their devices all do the same, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set
from typing import Any, Literal, NamedTuple

from ..errors import nearest
from ..sharding import AnyPartitionAxis, FittedRules, MeshAxis, axes_at
from .problem import AttentionProblem

__all__ = ["RepeatedAxis", "named_axes", "repeated_axes", "repeated_lines", "repeated_work", "unintended_repeats"]

Cause = Literal["gathered", "indivisible", "length_1", "unnamed"]

# Usual names of mesh axes, by the field of the partition axis that says what they split; for any other name, the batch.
_USUAL = {
    "tensor_parallel_axis": ("tensor", "model", "mp", "mdl", "heads", "tensor_parallel"),
    "sequence_parallel_axis": ("seq", "sequence", "context", "cp", "context_parallel"),
}


class RepeatedAxis(NamedTuple):
    """A mesh axis that splits neither queries nor the keys that a device attends to, so that its devices do the same work.

    splits: the tensors of the call that are nevertheless declared split over it. They are gathered for the work.
    cause: "gathered" if there are such tensors; "indivisible" or "length_1" if the lengths declared split over it don't allow
    that; "unnamed" if none is declared split over it.
    """

    axis: str
    size: int
    splits: tuple[str, ...]
    cause: Cause
    reason: str
    hint: str


def repeated_axes(problem: AttentionProblem, fitted: FittedRules, working: Set[str]) -> tuple[RepeatedAxis, ...]:
    """The axes of the problem's mesh that are longer than 1 and not in `working`. Manual axes are the caller's and left out."""
    return tuple(_repeated(axis, problem, fitted) for axis in problem.mesh if axis.splits and axis.name not in working)


def unintended_repeats(repeated: Sequence[RepeatedAxis], rules: AnyPartitionAxis) -> tuple[RepeatedAxis, ...]:
    """Those that a declaration didn't ask for: a length doesn't divide, or the rules don't know the axis in any mode."""
    known = named_axes(rules)
    return tuple(
        axis for axis in repeated if axis.cause == "indivisible" or (axis.cause == "unnamed" and axis.axis not in known)
    )


def named_axes(rules: AnyPartitionAxis) -> Set[str]:
    """All mesh axes that a partition axis names, in any mode and for any tensor."""
    fields = [getattr(rules, field.name) for field in dataclasses.fields(rules)]
    return {name for names in fields for name in (names if isinstance(names, tuple) else (names,))}


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
    specs = [spec for spec in fitted.specs if spec.tensor != "query3d"]
    splits = tuple(
        spec.tensor for spec in specs if any(axis.name in spec.axes(index) for index in range(len(spec.shape)))
    )
    if splits:
        reason = f"each device works on all parts of {', '.join(splits)}"
        if axis.name in fitted["key"].axes(problem.layout.index("t")):
            hint = (
                "Declare sequence_parallel='auto' or 'ring', with which each device attends to its own part of the keys"
            )
        else:
            hint = f"Split batch, queries or heads over {axis.name!r}, or take it out of the mesh"
        return RepeatedAxis(axis.name, axis.size, splits, "gathered", reason, hint)
    drops = [drop for spec in specs for drop in spec.dropped if drop.axis == axis.name]
    if drops:
        # Only for the first tensor, which is the query if the axis is declared for it: the others follow it.
        reasons = dict.fromkeys(f"{d.dim} of {d.tensor}: {d.reason}" for d in drops if d.tensor == drops[0].tensor)
        hint = f"Choose sizes that {axis.name!r} divides, split another dimension over it, or take it out of the mesh"
        cause: Cause = "length_1" if all(drop.harmless for drop in drops) else "indivisible"
        return RepeatedAxis(axis.name, axis.size, (), cause, ", ".join(reasons), hint)
    named = _named(problem)
    absent = named - {other.name for other in problem.mesh}
    close = "" if axis.name in named else nearest(axis.name, sorted(absent))
    field = next((field for field, names in _USUAL.items() if axis.name in names), "data_parallel_axis")
    such = "" if close else f", such as partition_axis={{{field!r}: {axis.name!r}}}"
    hint = f"{close} Name it in the partition axis{such}, or take it out of the mesh"
    return RepeatedAxis(
        axis.name, axis.size, (), "unnamed", "no tensor of this call is declared split over it", hint.strip()
    )


def _named(problem: AttentionProblem) -> set[str]:
    """All axes that the rules name, also for tensors that are not in this call."""
    specs = [spec for spec in problem.rules if spec is not None]
    return {axis for spec in specs for index in range(len(spec)) for axis in axes_at(spec, index)}
