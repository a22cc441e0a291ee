"""Estimate: how long a planned call takes on a machine, as terms that add up, and the least that a device has to hold."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..planning import Plan
from ..planning.placed_tensors import all_axes, axes_by_dim, placed_tensors, sent_itemsize
from ..planning.traffic import Need, min_traffic
from .axis_segments import AxisSegment, assign_axes
from .compute_time import ComputeTime, compute_time
from .machine import Machine
from .sending import hops, reordered_seconds, ring_hop_seconds, seconds_of
from .tiles import kernels_of_pass

__all__ = ["Estimate", "PassEstimate", "Send", "Term", "estimate"]

_WORK, _AROUND, _ORDER = "work", "around the ring", "zigzag"


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
    plan: Plan, machine: Machine, sizes: Mapping[str, int] | None = None, around: tuple[Need, ...] = ()
) -> Estimate:
    """Estimate a planned call that can run. sizes: the plan's mesh in another order, which decides how its axes lie. around: what
    the backward pass sends besides, for projections around the call."""
    sizes = {axis.name: axis.size for axis in plan.problem.mesh} if sizes is None else sizes
    segments = assign_axes(machine.physical, sizes)
    pass_costs = _pass_costs(plan, machine, around)
    passes = (_pass(plan, machine, segments, known_pass) for known_pass in pass_costs.passes)
    return Estimate(machine, tuple(passes), *pass_costs.bytes)


class _Pass(NamedTuple):
    name: str
    done: ComputeTime
    needs: tuple[Need, ...]
    unknown: tuple[str, ...]


class _PassCosts(NamedTuple):
    passes: tuple[_Pass, ...]
    bytes: tuple[int, int, int]


@functools.lru_cache(maxsize=64)
def _pass_costs(plan: Plan, machine: Machine, around: tuple[Need, ...]) -> _PassCosts:
    """What doesn't depend on how the mesh lies."""
    backward = plan.problem.mode == "__train__"
    forward = min_traffic(plan, False)
    passes = [
        _Pass("forward", compute_time(machine, plan, kernels_of_pass(plan, False)), forward.needs, forward.unknown)
    ]
    if backward:
        both = min_traffic(plan, True)
        rest, unknown = (*both.needs[len(forward.needs) :], *around), both.unknown[len(forward.unknown) :]
        passes.append(_Pass("backward", compute_time(machine, plan, kernels_of_pass(plan, True)), rest, unknown))
    return _PassCosts(tuple(passes), (*_operands(plan, backward), _strategy_bytes(plan, machine, backward)))


def _pass(plan: Plan, machine: Machine, segments: Mapping[str, tuple[AxisSegment, ...]], costs: _Pass) -> PassEstimate:
    name, compute, needs, unknown = costs
    needs = tuple(need for need in needs if not need.optional)
    work, waiting = _shared(compute, machine, plan)
    groups: dict[tuple[str, tuple[str, ...], str], list[Need]] = {}
    for need in needs:
        word = {"ring": _AROUND, "zigzag": _ORDER}.get(need.step, "")
        groups.setdefault((need.kind, need.axes, word), []).append(need)
    sends = [
        _send(plan, machine, compute, key, members, _along(segments, key[1]), name == "backward")
        for key, members in groups.items()
    ]
    return PassEstimate(name, work, waiting, compute.bound, tuple(sends), unknown)


def _shared(compute: ComputeTime, machine: Machine, plan: Plan) -> tuple[float, float]:
    """(work of the mean device, the wait beyond it: at each hop the busiest device counts)."""
    mean, lockstep = float(compute.seconds.sum(1).mean()), float(compute.seconds.max(0).sum())
    if machine.cpu is not None:
        steps = len(plan.placement.sequence.steps) or 1
        return (mean + steps * machine.cpu.step_seconds) * plan.problem.devices, 0.0
    return mean, lockstep - mean


def _along(segments: Mapping[str, tuple[AxisSegment, ...]], axes: tuple[str, ...]) -> tuple[AxisSegment, ...]:
    return tuple(segment for axis in axes for segment in segments[axis])


def _send(
    plan: Plan,
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


def _operands(plan: Plan, backward: bool) -> tuple[int, int]:
    """Bytes of (arguments, results) per device; for both passes with the outputs' gradients and all others."""
    problem, placement = plan.problem, plan.placement
    sizes = {axis.name: axis.size for axis in problem.mesh}
    inputs = outgoing = gradients = 0
    for tensor in placed_tensors(problem, placement):
        bytes_ = tensor.call_bytes(sizes)
        inputs += bytes_
        gradients += bytes_ if tensor.gradient else 0
    parts = math.prod(sizes[a] for a in all_axes(axes_by_dim(placement.spec("output"), 4)))
    outgoing += math.prod(problem.shape_of("output")) * problem.itemsize_of("output") // parts
    if "return_lse" in problem.features:
        wide = jnp.dtype(problem.softmax_dtype).itemsize
        split = math.prod(sizes[a] for a in all_axes(axes_by_dim(placement.spec("lse"), 3)))
        outgoing += problem.batch * problem.q_heads * problem.q_len * wide // split
    return (inputs + outgoing, outgoing + gradients) if backward else (inputs, outgoing)


def _strategy_bytes(plan: Plan, machine: Machine, backward: bool) -> int:
    """Bytes that the strategy holds besides operands and results: gathered keys, keys received around a ring, exchanged
    tensors; backward the gradients of these too, around a ring in float32."""
    problem, split, local = plan.problem, plan.placement.sequence, plan.placement.local
    item = sent_itemsize(problem.runtime_dtype, machine.platform == "cpu")
    width, rows = problem.token_dim, local.batch * local.q_heads * local.q_len * split.chunks
    keys = local.batch * local.kv_heads * local.kv_len * split.chunks * width
    size = 0
    if split.gathers:
        size += keys * item
    if split.head_axes:
        size += keys * item + rows * problem.head_dim * item
    if split.ring_axes:
        size += keys * item
    if backward and split.strategy:
        size += keys * (4 if split.ring_axes else item)
    if plan.route is not None and plan.route.name == "plain":
        size += local.batch * local.q_heads * local.q_len * local.kv_len * jnp.dtype(problem.softmax_dtype).itemsize
    return size
