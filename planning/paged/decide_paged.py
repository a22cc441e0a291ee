"""plan_paged(operation, problem, policy): decide what runs a step over pages, and record why."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...sharding import FittedSpec, TensorShape, axes_at, fit_tensor
from .. import tune_cache
from ..cache.cache_fields import axis_names
from ..cache.cache_plan import CachePlan
from ..capability import Reason
from ..notes import note
from ..operation import METHODS, PlannedOperation
from ..plan_fields import Kind, Rejected
from ..policy import Policy
from .paged_plan import PagedPlan
from .paged_problem import PagedProblem
from .step_tuning import choose_step

__all__ = ["plan_paged", "token_specs"]


def plan_paged(operation: type[PlannedOperation], problem: PagedProblem, policy: Policy) -> PagedPlan:
    """Decide what runs, from the step, the policy and the tuned choices. Cached until a new choice is stored.

    If nothing can run the step, the plan is of kind 'refused'. Errors: ConfigError with tuning='error' if no tuned choice is
    stored.
    """
    # mypy treats a class with an instance __hash__ as unhashable.
    return _decide(operation, problem, policy, tune_cache.state(problem.device))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _decide(operation: type[PlannedOperation], problem: PagedProblem, policy: Policy, kept: object) -> PagedPlan:
    del kept
    which: Any = operation
    platform = which.kernel_platform(problem)
    own = tuple(method for method in METHODS.get(platform, ()) if operation.implements(method))
    notes = list(problem.notes)
    if joined := problem.joined_bytes:
        n = problem.sequence_shards
        notes.append(note("paged.merged", axes=problem.sequence_axes, size=joined, sent=2 * joined * (n - 1) // n))
    if platform != problem.platform:
        notes.append(note("platform.interpreted", platform=platform, here=problem.platform))
    kind: Kind = "refused"
    rejected: list[Rejected] = []
    implementation, chosen, config, tuning = None, None, problem.config, None
    for method in (*own, "forward_native"):
        name = f"{operation.name}.{method}"
        if method == "forward_native" and own and policy.fallback == "error":
            reason = Reason("policy.fallback", "fallback", "fallback is an error by policy", "Declare fallback='warn'.")
            rejected.append(Rejected(name, (reason,)))
            break
        reasons = which.reasons_against(method, problem)
        if reasons:
            rejected.append(Rejected(name, reasons))
            continue
        kind = "platform" if method in own else "fallback" if own else "native"
        implementation, chosen, runs = name, method, which.implementation(method)
        found = choose_step(operation, method, problem, policy.tuning)
        if found is not None:
            tuning = found.tuning
            notes.extend(tuning.notes)
        config = (found and found.config) or runs.resolve(problem, None)
        if kind == "native":
            notes.append(note("platform.no_kernel", operation=operation.name, platform=problem.platform))
        notes.extend(runs.notes(problem, None, config))
        break
    return PagedPlan(
        operation,
        problem,
        policy,
        kind,
        implementation,
        chosen,
        config,
        _tensors(problem),
        tuple(rejected),
        tuple(notes),
        tuning,
    )


def token_specs(cache: CachePlan) -> tuple[PartitionSpec, PartitionSpec]:
    """(spec of query and output, spec of key and value), [tokens, heads, dim], from the specs of a cache's plan.

    Heads of key and value arrive unrepeated, so they are split only if they needn't be repeated.
    """
    pages = cache.pages_array.fitted.spec
    split, heads = (axes_at(pages, index) or None for index in (0, cache.heads_at))
    along = axis_names(cache.cache.page_sequence_axis)
    tokens = tuple(name for name in split or () if name not in along) or None
    query = PartitionSpec(tokens, heads, None)
    return query, query if cache.kv_repeat == 1 else PartitionSpec(tokens, None, None)


def _tensors(problem: PagedProblem) -> tuple[FittedSpec, ...]:
    of_query, of_key = token_specs(problem.cache)
    found = []

    def add(name: str, spec: PartitionSpec, heads: int, dim: int, dtype: str) -> None:
        shape = TensorShape((problem.tokens, heads, dim), jnp.dtype(dtype).itemsize)
        found.append(fit_tensor(name, spec, shape, ("tokens", "heads", "dim"), problem.mesh))

    add("query", of_query, problem.q_heads, problem.head_dim, problem.input_dtype)
    if problem.update != "none":
        add("key", of_key, problem.kv_heads, problem.head_dim, problem.key_dtype)
        add("value", of_key, problem.kv_heads, problem.value_dim, problem.value_dtype)
    if problem.mode != "insert":
        add("output", of_query, problem.q_heads, problem.value_dim, problem.runtime_dtype)
    return tuple(found)
