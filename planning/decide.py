"""plan(operation, problem, policy): the function that decides what runs, and records why."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from . import tune_cache
from .capability import Reason
from .implementations import Implementation, dequantised_copy
from .notes import note
from .operation import METHODS, PlannedOperation
from .operation_config import OperationConfig
from .plan import Plan
from .plan_fields import Kind, Rejected
from .policy import Policy
from .problem import AttentionProblem
from .sequence.choice import declared_strategy, placements
from .sequence.notes import sequence_notes
from .sequence.reasons import sequence_reasons
from .tuning import choose

__all__ = ["plan"]


def _unresolved(problem: AttentionProblem, error: ConfigError) -> Reason:
    """Why a config can't be resolved for a problem. The error says what is expected."""
    declared = problem.config.model_fields_set - {"operation", "schema_version"}
    hint = "Declare other sizes, or leave them out." if declared else "Split the call over more devices."
    return Reason("config", "operation_configs", str(error).removesuffix("."), hint)


def _unread(method: str, runs: Implementation[Any], config: OperationConfig) -> tuple[str, ...]:
    """A note of declared config fields that the implementation doesn't read."""
    declared = sorted(config.model_fields_set - {"operation", "schema_version"})
    if not declared or runs.reads(config):
        return ()
    return (note("config.unread", method=method, fields=declared),)


_DEFAULT = Policy()


def plan(operation: type[PlannedOperation], problem: AttentionProblem, policy: Policy = _DEFAULT) -> Plan:
    """Decide what runs, from the operation, the problem, the policy and the tuned choices. Cached until a new choice is stored.

    Errors: ShardingError, or ConfigError if no tuned sizes are stored, if the policy requires that. If nothing can run the
    problem, or if with fallback='error' the config can't be resolved, the plan is of kind 'refused'.
    """
    # mypy treats a class with an instance __hash__ as unhashable.
    return _decide(operation, problem, policy, tune_cache.state(problem.device))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _decide(operation: type[PlannedOperation], problem: AttentionProblem, policy: Policy, kept: object) -> Plan:
    del kept
    place, strategy = placements(operation, problem, policy), declared_strategy(operation, policy.sequence_parallel)
    platform = operation.kernel_platform(problem)
    own = tuple(m for m in METHODS.get(platform, ()) if operation.implements(m))
    placement = place(own[0] if own else "forward_native")
    notes = list(problem.notes)
    if platform != problem.platform:
        notes.append(note("platform.interpreted", platform=platform, here=problem.platform))
    rejected: list[Rejected] = []
    routed = bool(own) and all(operation.capability(m).leaves(problem, problem.config) for m in own)
    decided = Plan(
        operation, problem, policy, "refused", None, None, problem.config, placement, (), None, None, None, ()
    )
    for method in (*own, "forward_native"):
        name = f"{operation.name}.{method}"
        if method == "forward_native" and own and not routed and policy.fallback == "error":
            reason = Reason("policy.fallback", "fallback", "fallback is an error by policy", "Declare fallback='warn'.")
            rejected.append(Rejected(name, (reason,)))
            break
        runs, placement = operation.implementation(method, problem.config), place(method)
        reasons = (
            *runs.capability.reasons(problem, problem.config),
            *sequence_reasons(operation, problem, placement, method, strategy, policy.ring_order),
        )
        if reasons:
            rejected.append(Rejected(name, reasons))
            continue
        try:
            config = runs.resolve(problem, placement)
        except ConfigError as error:
            rejected.append(Rejected(name, (_unresolved(problem, error),)))
            continue
        chosen = choose(operation, method, problem, placement, policy.tuning)
        tuning = None if chosen is None else chosen.tuning
        if chosen is not None:
            config = chosen.config or config
            notes.extend(chosen.tuning.notes)
        kind: Kind = "platform" if method in own else "routed" if routed else "fallback" if own else "native"
        if kind == "native":
            notes.append(note("platform.no_kernel", operation=operation.name, platform=problem.platform))
        padding = runs.padding(problem, placement, config)
        notes.extend(_unread(method, runs, config))
        if problem.quantised and runs.capability.dequantises:
            notes.append(note("memory.dequantised", method=method, **dequantised_copy(problem, placement)))
        notes.extend(runs.notes(problem, placement, config))
        notes.extend(operation.remarks(problem))
        notes.extend(sequence_notes(operation, policy, placement))
        if tuning is None and policy.tuning in ("tune", "error"):
            notes.append(note("tuning.no_sizes", tuning=policy.tuning, implementation=name))
        find_route = runs.capability.route
        route = None if find_route is None else find_route(problem, placement, config)
        decided = replace(
            decided,
            kind=kind,
            implementation=name,
            method=method,
            config=config,
            placement=placement,
            padding=padding,
            route=route,
            tuning=tuning,
        )
        break
    return replace(decided, rejected=tuple(rejected), notes=tuple(notes))
