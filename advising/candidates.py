"""Candidates: every mesh over a number of devices, with each strategy that its axes allow, and each operation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

__all__ = ["AXES", "SEQUENCE_AXES", "Candidate", "Family", "SearchSpace", "candidates", "meshes"]

AXES = ("fsdp", "cp", "sp", "tp")  # batch; the sequence, twice; heads
SEQUENCE_AXES = ("cp", "sp")  # for ulysses_ring: keys travel around the first, heads are split over the second


class Candidate(NamedTuple):
    """What would be declared: an operation, a batch, a mesh on a target, and how a split sequence is handled."""

    operation: str
    batch: int
    target: str
    sizes: tuple[tuple[str, int], ...]
    strategy: str | None = None
    order: str | None = None

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def kind(self) -> str:
        """Groups refusals, for example `ring`."""
        return self.strategy or "whole sequences"

    @property
    def where(self) -> str:
        """For example `fsdp=2,tp=4 on v5e:2x4`."""
        return ",".join(f"{name}={size}" for name, size in self.sizes) + f" on {self.target}"

    def fields(self) -> dict[str, Any]:
        """The metadata that it declares besides its mesh."""
        fields: dict[str, Any] = {}
        if self.strategy is not None:
            fields["sequence_parallel"] = self.strategy
        if self.order is not None:
            fields["ring_order"] = self.order
        if "cp" in self.mesh:
            axes = list(SEQUENCE_AXES)
            fields["partition_axis"] = {"query_sequence_axis": axes, "key_sequence_axis": axes}
        return fields


class Family(Protocol):
    """What a search asks of calls of one family before they are planned."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """What may be done about a split sequence."""
        ...

    def operations(self, declared: str, platform: str, kind: Any) -> tuple[str, ...]:
        """The declared operation, and others worth trying on the platform."""
        ...

    def batch(self, problem: Any) -> int:
        """Rows of a call; 1 of a packed one."""
        ...

    def split_by(self, problem: Any, generating: bool) -> tuple[tuple[str, int, str], ...]:
        """(mesh axis, a number that it has to divide, of what, in the plural); 'sp' stands for all axes of the sequence."""
        ...

    def second_axis(self, space: SearchSpace, sizes: Mapping[str, int]) -> str:
        """Why a mesh with a second axis of the sequence is none for these calls; '' if it is."""
        ...

    def ways(self, space: SearchSpace, sizes: Mapping[str, int]) -> Iterator[tuple[str | None, str | None]]:
        """(strategy, ring order) pairs that a mesh has the axes for."""
        ...


class SearchSpace(NamedTuple):
    """What to enumerate for one batch: the call, the fixed axes, and the open strategies and ring orders. family: what its calls
    may be split by."""

    problem: Any
    operations: tuple[str, ...]
    fixed: Mapping[str, int]
    strategies: tuple[str, ...]
    orders: tuple[str | None, ...]
    generating: bool
    family: Family


def meshes(devices: int, fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every way to factor a number of devices over the axes, without axes of 1."""

    def factored(left: int, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
        name, *rest = names
        choices = [fixed[name]] if name in fixed else [n for n in range(1, left + 1) if left % n == 0]
        for size in choices:
            if left % size:
                continue
            if not rest:
                if size == left:
                    yield {name: size}
                continue
            for others in factored(left // size, tuple(rest)):
                yield {name: size, **others}

    for sizes in factored(devices, AXES):
        yield {name: size for name, size in sizes.items() if size > 1}


def candidates(space: SearchSpace, batch: int, devices: int, target: str) -> Iterator[Candidate | tuple[str, str]]:
    """Candidates, and (kind, reason) for what lengths and heads rule out before planning."""
    for sizes in meshes(devices, space.fixed):
        if reason := _indivisible(space, sizes):
            yield reason
            continue
        named = tuple(sizes.items()) or (("fsdp", 1),)
        for operation in space.operations:
            for strategy, order in space.family.ways(space, sizes):
                yield Candidate(operation, batch, target, named, strategy, order)


def _indivisible(space: SearchSpace, sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """Why a mesh would make some devices repeat others' work."""
    problem = space.problem
    if problem.layout == "thd" and "fsdp" in sizes:
        return "fsdp", "packed tensors have no batch to split"
    over = dict(sizes) | {"sp": math.prod(sizes.get(name, 1) for name in SEQUENCE_AXES)}
    for name, number, things in space.family.split_by(problem, space.generating):
        if number % over.get(name, 1):
            thing = things if number > 1 else things[:-1]
            return name, f"{number} {thing} can't be divided over this many devices"
    if "cp" in sizes and (reason := space.family.second_axis(space, sizes)):
        return "cp", reason
    return None
