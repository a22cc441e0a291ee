"""plan(operation, problem, policy): the function that decides what runs, and records why."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from . import tune_cache
from .capability import Reason
from .decision import Decision, Kind, Rejected
from .implementations import Implementation
from .notes import note
from .operation import METHODS, PlannedOperation
from .operation_config import OperationConfig
from .planner import Request
from .policy import Policy
from .problem import Problem
from .tuning import choose

__all__ = ["plan"]


def _unresolved(problem: Problem, error: ConfigError) -> Reason:
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


def _leaves(operation: type[PlannedOperation], method: str, problem: Any) -> bool:
    """Whether a method leaves such problems to another one."""
    config = operation.implementation(method, problem.config).declared(problem.config)
    return operation.capability(method).leaves(problem, config)


_DEFAULT = Policy()


def plan(operation: type[PlannedOperation], problem: Problem, policy: Policy = _DEFAULT) -> Any:
    """Decide what runs, from the operation, the problem, the policy and the tuned choices. Cached until a new choice is stored.

    Returns the Plan of a call or the PagedPlan of a step. Errors: ShardingError, or ConfigError if no tuned sizes are stored, if
    the policy requires that. If nothing can run the problem, or if with fallback='error' the config can't be resolved, the plan
    is of kind 'refused'.
    """
    # mypy treats a class with an instance __hash__ as unhashable.
    return _decide(operation, problem, policy, tune_cache.state(problem.device))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _decide(
    operation: type[PlannedOperation], problem: Any, policy: Policy, cache_version: object
) -> Decision[Any, Any]:
    planner, request = operation.planner, Request(operation, problem, policy)
    place = planner.placements(request)
    platform = operation.kernel_platform(problem)
    methods = tuple(
        m
        for m in METHODS.get(platform, ())
        if operation.implements(m) and operation.implementation(m, problem.config).serves(problem)
    )
    placement = place(methods[0] if methods else "forward_native")
    notes = list(problem.notes)
    if platform != problem.platform:
        notes.append(note("platform.interpreted", platform=platform, here=problem.platform))
    rejected: list[Rejected] = []
    routed = bool(methods) and all(_leaves(operation, method, problem) for method in methods)
    decided = planner.plan(operation, problem, policy, "refused", None, None, problem.config, placement, ())
    for method in (*methods, "forward_native"):
        name = f"{operation.name}.{method}"
        if methods and method not in methods and not routed and policy.fallback == "error":
            reason = Reason("policy.fallback", "fallback", "fallback is an error by policy", "Declare fallback='warn'.")
            rejected.append(Rejected(name, (reason,)))
            break
        runs, placement = operation.implementation(method, problem.config), place(method)
        reasons = planner.reasons(request, method, placement)
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
        kind: Kind = "platform" if method in methods else "routed" if routed else "fallback" if methods else "native"
        if kind == "native":
            notes.append(note("platform.no_kernel", operation=operation.name, platform=problem.platform))
        notes.extend(_unread(method, runs, config))
        notes.extend(runs.notes(problem, placement, config))
        notes.extend(planner.notes(request, method, placement))
        if tuning is None and policy.tuning in ("tune", "error"):
            notes.append(note("tuning.no_sizes", tuning=policy.tuning, implementation=name))
        find_route = runs.capability.route
        decided = replace(
            decided,
            kind=kind,
            implementation=name,
            method=method,
            config=config,
            placement=placement,
            padding=runs.padding(problem, placement, config),
            route=None if find_route is None else find_route(problem, placement, runs.declared(config)),
            tuning=tuning,
        )
        break
    return replace(decided, rejected=tuple(rejected), notes=tuple(notes))
