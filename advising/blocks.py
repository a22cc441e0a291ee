"""Block sizes: of those that a size search would try, the ones with a clearly shorter estimate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..planning import decide
from .entries import Entry
from .estimate import estimate
from .latent_form import needs_around

__all__ = ["better_blocks"]

_GAIN = 0.9  # closer estimates don't count: a tile's is up to 10 % off (docs/advise.md)
_MAX_CANDIDATES = 8  # per pass


def better_blocks(entry: Entry) -> Entry:
    """The entry with other sizes declared, if they are open, no search has stored any, and the estimate gains."""
    plan = entry.plan
    if plan.runs is None or (plan.tuning is not None and plan.tuning.source != "heuristic"):
        return entry
    best = entry.estimate
    machine, order = best.machine, entry.candidate.mesh
    around = needs_around(entry.base_declaration, plan)
    candidates = plan.runs.candidates(plan.problem, plan.placement)
    # Of all passes: those of one may depend on another's.
    chosen = {part: part_candidates[0] for part, part_candidates in candidates.items()}
    for part, part_candidates in candidates.items():
        for fields in _distinct(part_candidates):
            config = plan.problem.config.with_fields(_merged(chosen | {part: fields}))
            again = decide.plan(plan.operation, replace(plan.problem, config=config), plan.policy)
            if again.implementation != plan.implementation:
                continue
            guess = estimate(again, machine, order, around)
            if guess.seconds < best.seconds * _GAIN:
                best, chosen[part] = guess, fields
    if best is entry.estimate:
        return entry
    sizes = _merged(chosen)
    tag = plan.problem.config.operation
    configs = dict(entry.base_declaration.metadata.get("operation_configs") or {})
    configs[tag] = {**(configs.get(tag) or {}), **sizes}
    metadata = entry.base_declaration.metadata | {"operation_configs": configs}
    declaration = entry.base_declaration.model_copy(update={"metadata": metadata}).checked()
    problem = replace(plan.problem, config=plan.problem.config.with_fields(sizes))
    others = {name: value for name, value in sizes.items() if getattr(plan.config, name) != value}
    sizes_text = ", ".join(f"{name}={value}" for name, value in others.items())
    notes = (*entry.notes, f"{sizes_text}: estimated faster than the default sizes")
    return replace(
        entry,
        base_declaration=declaration,
        plan=decide.plan(plan.operation, problem, plan.policy),
        estimate=best,
        notes=notes,
    )


def _merged(chosen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: value for fields in chosen.values() for name, value in fields.items()}


def _distinct(candidates: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first few with distinct tiles: options within a tile make no difference to an estimate."""
    distinct: dict[Any, dict[str, Any]] = {}
    for fields in candidates:
        tiles = tuple((n, v) for n, v in fields.items() if n.startswith("block_") and "compute" not in n)
        distinct.setdefault(tiles, fields)
    return list(distinct.values())[:_MAX_CANDIDATES]
