"""advise: plan every candidate, refuse those that can't run with the reason, estimate the rest, and compile the best few."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import AttnOpsError, ConfigError, is_whole, shown
from ..planning.text import bytes_text
from ..planning.traffic import Need
from ..registry import OperationRegistry
from ..registry.declaration import Declaration
from ..sharding.modes import GENERATION
from .advice import Advice
from .axis_segments import assign_axes
from .candidates import AXES, Candidate, SearchSpace, candidates
from .compiling import Progress, compile_best
from .declared import SEARCHED, metadata_for
from .entries import Entry, Refusals
from .estimate import Estimate, estimate
from .families import FAMILIES, SearchedFamily
from .latent_form import call_arguments_of, latent_note, needs_around, with_form
from .machine import Machine, machine_of, with_devices
from .search_scope import open_choices, requested_devices, with_batch, with_mode

__all__ = ["advise"]

_COMPILED = 3
_REFINED = 6  # candidates whose block sizes are refined


def advise(
    declaration: Declaration | Mapping[str, Any] | str | Path,
    target: str,
    *,
    batches: Sequence[int] = (),
    devices: int | str | None = None,
    mesh: Mapping[str, int] | None = None,
    operations: Sequence[str] = (),
    mode: str | None = None,
    most_compiled: int = _COMPILED,
    progress: Progress | None = None,
) -> Advice:
    """Search what to declare for a call on a target: `v5p:4x4x4`, `h100:8`, `cpu:8`.

    batches: replace the declared one. devices: a number, or `8..64`, instead of all. mesh: axes (fsdp, cp, sp, tp) with fixed
    sizes. operations: replace the declared one and those known besides it. most_compiled: how many to compile, if the compiler
    is installed. progress is called with (done, of, what). What the file declares (a strategy, a ring order, block sizes) is
    kept.

    Errors: ConfigError for an unknown target, a number of devices that it has no part of, or an axis that isn't searched.
    """
    declared = with_mode(_declaration(declaration), mode)
    tell = progress or (lambda done, of, what: None)
    counts = requested_devices(machine_of(target), devices)
    _check_axes(mesh or {})
    family = FAMILIES[declared.family]
    entries: list[Entry] = []
    refused = Refusals()
    requests: list[tuple[Candidate, Declaration]] = []
    for batch in batches or (None,):
        machine = machine_of(target)
        batched = with_form(with_batch(declared, batch), machine)
        space = _search_space(batched, machine, mesh or {}, operations)
        for count in counts:
            name = with_devices(target, count)
            assert name is not None
            for offered in candidates(space, family.batch(space.problem), count, name):
                if isinstance(offered, Candidate):
                    requests.append((offered, batched))
                else:
                    refused.add(f"mesh axis {offered[0]}", "", offered[1], offered[1], f"{count} devices")
    for done, (candidate, requested) in enumerate(requests):
        tell(done, len(requests), candidate.where)
        outcome = _planned(candidate, requested)
        if isinstance(outcome, Entry):
            entries.append(outcome)
        else:
            refused.add(candidate.kind, candidate.operation, *outcome, candidate.where)
    tell(len(requests), len(requests), "")
    ranked = sorted(_distinct(entries, family), key=_rank)
    ranked = sorted([*map(family.refined, ranked[:_REFINED]), *ranked[_REFINED:]], key=_rank)
    notes = [*_notes(declared), *latent_note(declared)]
    ranked = compile_best(ranked, refused, most_compiled, tell, notes)
    return Advice(target, tuple(ranked), refused.ranked(), tuple(notes), len(requests))


def _rank(entry: Entry) -> tuple[bool, float, int, int]:
    """A candidate that isn't fully known can't win. Of equal times the one with least memory, of these the one that splits heads
    least, as other layers communicate for that, and of these the one that is searched first (sorting is stable)."""
    guess = entry.estimate
    return (
        bool(guess.unknown),
        entry.ranked_seconds,
        guess.about_bytes,
        entry.candidate.mesh.get("tp", 1),
    )


def _declaration(declaration: Declaration | Mapping[str, Any] | str | Path) -> Declaration:
    if not isinstance(declaration, Declaration):
        declaration = (
            Declaration.from_dict(declaration) if isinstance(declaration, Mapping) else Declaration.load(declaration)
        )
    if declaration.step is not None or not declaration.is_set("call"):
        raise ConfigError("advise is for calls, and this declares none or a step over pages. Hint: declare `call`.")
    if declaration.family not in FAMILIES:
        raise ConfigError(
            f"advise is for attention and recurrences, and operation {declaration.operation!r} is neither. "
            "Hint: `attnops verify` compiles it."
        )
    if "partition_axis" in declaration.metadata or "partition_manager" in declaration.metadata:
        raise ConfigError(
            f"advise names the mesh axes itself ({', '.join(AXES)}), but metadata.partition_axis names others. Hint: remove it."
        )
    return declaration


def _check_axes(fixed: Mapping[str, int]) -> None:
    unknown = next((name for name in fixed if name not in AXES), None)
    if unknown is not None:
        raise ConfigError(f"mesh axis {shown(unknown)} isn't searched; wanted one of {', '.join(AXES)}.")
    for name, size in fixed.items():
        if not is_whole(size, 1):
            raise ConfigError(f"mesh {name}={shown(size)}; wanted a number of devices, from 1 on.")


def _search_space(
    declaration: Declaration, machine: Machine, fixed: Mapping[str, int], operations: Sequence[str]
) -> SearchSpace:
    kind: Any = OperationRegistry.get(declaration.operation)
    metadata = metadata_for(declaration, machine, {"fsdp": 1}, {})
    problem = kind(metadata).plan(**call_arguments_of(declaration)).problem
    for name in operations:
        OperationRegistry.get(name)
    family = FAMILIES[declaration.family]
    others = tuple(operations) or family.operations(declaration.operation, machine.platform, kind)
    strategies, orders = open_choices(declaration, kind, family.strategies)
    return SearchSpace(problem, others, fixed, strategies, orders, problem.mode in GENERATION, family)


def _planned(candidate: Candidate, declaration: Declaration) -> Entry | tuple[str, str]:
    """The entry with the fastest order of axes, or the code and the reason why it can't run."""
    machine = machine_of(candidate.target)
    try:
        plan = _plan(candidate, declaration, machine)
    except AttnOpsError as error:
        return type(error).__name__, str(error).splitlines()[0]
    if plan.implementation is None:
        reasons = {
            r.code: r.message for rejected in plan.rejected for r in rejected.reasons if r.code != "policy.fallback"
        }
        return "; ".join(reasons), "; ".join(reasons.values())
    family = FAMILIES[declaration.family]
    if repeated := family.repeated(plan):
        return "repeated", f"devices do the same work: {repeated}"
    order, guess = _best_order(plan, machine, needs_around(declaration, plan))
    if order != candidate.sizes:
        candidate = candidate._replace(sizes=order)
        plan = _plan(candidate, declaration, machine)
    have = machine.hbm_bytes
    if have is not None and guess.least_bytes > have:
        return "memory", f"a device needs at least {bytes_text(guess.least_bytes)} and has {bytes_text(have)}"
    return Entry(candidate, declaration, plan, guess, *family.split(plan))


def _plan(candidate: Candidate, declaration: Declaration, machine: Machine) -> Any:
    kind: Any = OperationRegistry.get(candidate.operation)
    metadata = metadata_for(declaration, machine, candidate.mesh, candidate.fields())
    return kind(metadata).plan(**call_arguments_of(declaration))


def _best_order(plan: Any, machine: Machine, around: tuple[Need, ...]) -> tuple[tuple[tuple[str, int], ...], Estimate]:
    """The mesh's axes in the order that lies best on the links."""
    by_segments: dict[Any, tuple[tuple[tuple[str, int], ...], Estimate]] = {}
    axes = [(axis.name, axis.size) for axis in plan.problem.mesh]
    for order in itertools.permutations(axes):
        segments = assign_axes(machine.physical, dict(order))
        key = tuple(sorted(segments.items()))
        if key not in by_segments:
            by_segments[key] = order, estimate(plan, machine, dict(order), around)
    return min(by_segments.values(), key=lambda ordered: ordered[1].seconds)


def _distinct(entries: Iterable[Entry], family: SearchedFamily) -> list[Entry]:
    """Drop those that run the same as another."""
    best: dict[Any, Entry] = {}
    for entry in entries:
        best.setdefault(family.runs_as(entry), entry)
    return list(best.values())


def _notes(declaration: Declaration) -> tuple[str, ...]:
    ignored = [name for name in ("mesh", "platform", "backend") if declaration.metadata.get(name) is not None]
    notes = [f"metadata.{name} is ignored: the target decides it" for name in ignored]
    if (tuning := declaration.metadata.get("tuning")) in SEARCHED:
        notes.append(f"metadata.tuning={tuning!r} is ignored here: stored sizes are used, otherwise the default ones")
    return tuple(notes)
