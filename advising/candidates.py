"""Candidates: every mesh over a number of devices, with each strategy that its axes allow, and each operation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..planning import AttentionProblem, OperationConfig

__all__ = ["AXES", "SEQUENCE_AXES", "Candidate", "SearchSpace", "candidates", "meshes"]

AXES = ("fsdp", "cp", "sp", "tp")  # batch; the sequence, twice; heads
SEQUENCE_AXES = ("cp", "sp")  # for ulysses_ring: keys travel around the first, heads are split over the second
# Operations tried besides the declared one, by platform.
_OPERATIONS = {"tpu": ("splash", "vanilla"), "cuda": ("flash_attn2", "sdpa", "vanilla")}


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


class SearchSpace(NamedTuple):
    """What to enumerate for one batch: the call, the fixed axes, and the open strategies and ring orders."""

    problem: AttentionProblem
    operations: tuple[str, ...]
    fixed: Mapping[str, int]
    strategies: tuple[str, ...]
    orders: tuple[str | None, ...]
    generating: bool


def operations_for(declared: str, platform: str, config: type[OperationConfig] | None) -> tuple[str, ...]:
    """The declared operation, and others worth trying on the platform; none whose kernels the declared one runs itself.

    config: the config class of that other operation, if there is one.
    """
    elsewhere = None if config is None else config.model_fields["operation"].default
    others = (name for name in _OPERATIONS.get(platform, ()) if name != elsewhere)
    return tuple(dict.fromkeys((declared, *others)))


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
    problem = space.problem
    for sizes in meshes(devices, space.fixed):
        if reason := _indivisible(problem, sizes, space.generating):
            yield reason
            continue
        named = tuple(sizes.items()) or (("fsdp", 1),)
        for operation in space.operations:
            for strategy, order in _ways(space, sizes):
                yield Candidate(operation, batch, target, named, strategy, order)


def _indivisible(problem: AttentionProblem, sizes: Mapping[str, int], generating: bool) -> tuple[str, str] | None:
    """Why a mesh would make some devices repeat others' work."""
    sequence = math.prod(sizes.get(name, 1) for name in SEQUENCE_AXES)
    length, tokens = (problem.kv_len, "keys") if generating else (problem.q_len, "queries")
    if problem.layout == "thd" and "fsdp" in sizes:
        return "fsdp", "packed tensors have no batch to split"
    for name, size, number, thing in (
        ("fsdp", sizes.get("fsdp", 1), problem.batch, "batch rows"),
        ("tp", sizes.get("tp", 1), problem.q_heads, "query heads"),
        ("sp", sequence, length, tokens),
        ("sp", sequence, problem.kv_len, "keys"),
    ):
        if number % size:
            return name, f"{number} {thing if number > 1 else thing[:-1]} can't be divided over this many devices"
    if "cp" in sizes and ("sp" not in sizes or generating):
        return "cp", "a second sequence axis requires ulysses_ring, which uses both"
    return None


def _ways(space: SearchSpace, sizes: Mapping[str, int]) -> Iterator[tuple[str | None, str | None]]:
    """(strategy, ring order) pairs that a mesh has the axes for."""
    if "sp" not in sizes:
        yield None, None
    elif space.generating:
        yield "auto", None
    else:
        for strategy in space.strategies:
            if (strategy == "ulysses_ring") != ("cp" in sizes):
                continue
            rings = strategy in ("ring", "ulysses_ring")
            for order in space.orders if rings else (None,):
                yield strategy, order
