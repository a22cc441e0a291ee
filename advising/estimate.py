"""Estimate: how long a planned call takes on a machine, as terms that add up, and the least that a device has to hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..planning.traffic import Need
from .attention_costs import attention_costs
from .axis_segments import AxisSegment, assign_axes
from .compute_time import ComputeTime
from .costs import PassCost
from .machine import Machine
from .recurrent_costs import recurrent_costs
from .sending import hops, reordered_seconds, ring_hop_seconds, seconds_of

__all__ = ["Estimate", "PassEstimate", "Send", "Term", "estimate"]

_WORK, _AROUND, _ORDER = "work", "around the ring", "zigzag"
_COSTS = {"attention": attention_costs, "recurrence": recurrent_costs}  # by the family of the plan's operation


@dataclass(frozen=True)
class Send:
    """What a device sends of one kind along some mesh axes: bytes, seconds, and the seconds in which nothing else is done."""

    kind: str
    what: str
    axes: tuple[str, ...]
    sent_bytes: float
    seconds: float
    waited: float


@dataclass(frozen=True)
class Term:
    """A part of a pass's time."""

    name: str
    seconds: float


@dataclass(frozen=True)
class PassEstimate:
    """One pass on its own: terms that add up to its seconds. bound: what limits the work."""

    name: str
    work: float
    waiting: float
    bound: str
    sends: tuple[Send, ...]
    unknown: tuple[str, ...]

    @property
    def terms(self) -> tuple[Term, ...]:
        """Work of the mean device, waiting for the busiest one, and each collective's share that isn't overlapped."""
        sends = [Term(f"{send.kind} over {'+'.join(send.axes)}", send.waited) for send in self.sends]
        return (Term(_WORK, self.work), Term("waiting for the busiest device", self.waiting), *sends)

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def sent_bytes(self) -> float:
        return sum(send.sent_bytes for send in self.sends)


@dataclass(frozen=True)
class Estimate:
    """Both passes of a training call, or the forward pass. Bytes per device: operands and results, which are exact, and an
    approximation of what the strategy holds besides them: a TPU's compiler may keep small arrays in VMEM instead."""

    machine: Machine
    passes: tuple[PassEstimate, ...]
    argument_bytes: int
    output_bytes: int
    held_bytes: int

    @property
    def seconds(self) -> float:
        return sum(estimated.seconds for estimated in self.passes)

    @property
    def sent_bytes(self) -> float:
        return sum(estimated.sent_bytes for estimated in self.passes)

    @property
    def least_bytes(self) -> int:
        """Bytes of operands and results."""
        return self.argument_bytes + self.output_bytes

    @property
    def about_bytes(self) -> int:
        """The same, with what the strategy holds."""
        return self.least_bytes + self.held_bytes

    @property
    def bound(self) -> str:
        """The longest term of all passes and, if there are several, its pass; of work also what limits it."""
        term, estimated = max(
            ((term, estimated) for estimated in self.passes for term in estimated.terms),
            key=lambda pair: pair[0].seconds,
        )
        cause = f"{_WORK}, by {estimated.bound}" if term.name == _WORK else term.name
        return f"{estimated.name} {cause}" if len(self.passes) > 1 else cause

    @property
    def unknown(self) -> tuple[str, ...]:
        """Traffic that is only known after compiling; the seconds are then too few."""
        return tuple(why for estimated in self.passes for why in estimated.unknown)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "seconds": self.seconds,
            "bound": self.bound,
            "sent_bytes": self.sent_bytes,
            "argument_bytes": self.argument_bytes,
            "output_bytes": self.output_bytes,
            "held_bytes": self.held_bytes,
            "passes": [
                {
                    "name": estimated.name,
                    "seconds": estimated.seconds,
                    "terms": [vars(term) for term in estimated.terms],
                    "sends": [vars(send) | {"axes": list(send.axes)} for send in estimated.sends],
                    "unknown": list(estimated.unknown),
                }
                for estimated in self.passes
            ],
        }


def estimate(
    plan: Any, machine: Machine, sizes: Mapping[str, int] | None = None, around: tuple[Need, ...] = ()
) -> Estimate:
    """Estimate a planned call that can run. sizes: the plan's mesh in another order, which decides how its axes lie. around: what
    the backward pass sends besides, for projections around the call."""
    sizes = {axis.name: axis.size for axis in plan.problem.mesh} if sizes is None else sizes
    segments = assign_axes(machine.physical, sizes)
    costs: Any = _COSTS[plan.operation.family]
    passes, *sizes_held = costs(plan, machine, around)
    return Estimate(machine, tuple(_pass(plan, machine, segments, known) for known in passes), *sizes_held)


def _pass(
    plan: Any, machine: Machine, segments: Mapping[str, tuple[AxisSegment, ...]], costs: PassCost
) -> PassEstimate:
    name, compute, needs, unknown, steps = costs
    needs = tuple(need for need in needs if not need.optional)
    work, waiting = _shared(compute, machine, plan.problem.devices, steps)
    groups: dict[tuple[str, tuple[str, ...], str], list[Need]] = {}
    for need in needs:
        word = {"ring": _AROUND, "zigzag": _ORDER}.get(need.step, "")
        groups.setdefault((need.kind, need.axes, word), []).append(need)
    sends = [
        _send(plan, machine, compute, key, members, _along(segments, key[1]), name == "backward")
        for key, members in groups.items()
    ]
    return PassEstimate(name, work, waiting, compute.bound, tuple(sends), unknown)


def _shared(compute: ComputeTime, machine: Machine, devices: int, steps: int) -> tuple[float, float]:
    """(work of the mean device, the wait beyond it: at each hop the busiest device counts)."""
    mean, lockstep = float(compute.seconds.sum(1).mean()), float(compute.seconds.max(0).sum())
    if machine.cpu is not None:
        return (mean + steps * machine.cpu.step_seconds) * devices, 0.0
    return mean, lockstep - mean


def _along(segments: Mapping[str, tuple[AxisSegment, ...]], axes: tuple[str, ...]) -> tuple[AxisSegment, ...]:
    return tuple(segment for axis in axes for segment in segments[axis])


def _send(
    plan: Any,
    machine: Machine,
    compute: ComputeTime,
    key: tuple[str, tuple[str, ...], str],
    needs: list[Need],
    segments: tuple[AxisSegment, ...],
    backward: bool,
) -> Send:
    kind, axes, word = key
    sent = sum(need.sent_bytes for need in needs)
    what = ", ".join(dict.fromkeys(need.what for need in needs))
    if machine.cpu is not None:  # the same cores make every device's copy
        seconds = sent * plan.problem.devices / machine.cpu.bytes_per_second
        return Send(kind, what, axes, sent, seconds, seconds)
    if word == _ORDER:
        seconds = reordered_seconds(sent, segments) + len(needs) * machine.hop_seconds * hops("all-to-all", segments)
        return Send(kind, what, axes, sent, seconds, seconds)
    if kind != "collective-permute":
        seconds = seconds_of(kind, sent, segments) + len(needs) * machine.hop_seconds * hops(kind, segments)
        return Send(kind, what, axes, sent, seconds, seconds)
    if word != _AROUND:
        seconds = sum(ring_hop_seconds(n.sent_bytes, segments, n.by) + machine.hop_seconds * n.by for n in needs)
        return Send(kind, what, axes, sent, seconds, seconds)
    split = plan.placement.sequence
    moves = [after - before for before, after in itertools.pairwise(split.steps)]
    if not moves:
        return Send(kind, what, axes, sent, 0.0, 0.0)
    home = [split.ring_size - split.steps[-1]] if backward else []
    per_move = sent / len([*moves, *home])
    hop_seconds = [
        ring_hop_seconds(per_move, segments, by) + machine.hop_seconds * min(by, split.ring_size - by)
        for by in (*moves, *home)
    ]
    seconds = sum(hop_seconds)
    work_seconds = [float(column.max()) for column in compute.seconds.T]  # the work done meanwhile
    hidden = (
        sum(min(a, b) for a, b in zip(hop_seconds[: len(moves)], work_seconds, strict=False))
        if machine.overlaps
        else 0.0
    )
    return Send(kind, what, axes, sent, seconds, seconds - hidden)
