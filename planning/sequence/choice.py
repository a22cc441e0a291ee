"""Choose the strategy for a split sequence for a plan's methods: as declared or, for 'auto', the one that sends the least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from ...errors import ConfigError
from ...sharding.modes import GENERATION
from ...symbolic import is_symbolic
from ..operation import PlannedOperation
from ..placement import Placement, place_problem
from ..problem import AttentionProblem
from ..text import bytes_text
from .reasons import MERGING, sequence_reasons

if TYPE_CHECKING:
    from ..policy import Policy

__all__ = ["declared_strategy", "placements"]


def declared_strategy(operation: type[PlannedOperation], declared: str) -> str:
    """The operation's own strategy, else the declared one. Errors: ConfigError if both are set and they differ."""
    fixed = operation.sequence_parallel
    if declared == "state":
        raise ConfigError(
            f"operation {operation.name!r} attends and has no state: sequence_parallel='state' is for recurrences; wanted "
            "'auto', 'gather', 'ring', 'ulysses' or 'ulysses_ring'."
        )
    if fixed is not None and declared not in ("auto", fixed):
        raise ConfigError(
            f"operation {operation.name!r} always has sequence_parallel={fixed!r}, but {declared!r} is declared; leave "
            f"sequence_parallel out, or create an operation that accepts it, such as 'splash'."
        )
    return fixed or declared


def placements(
    operation: type[PlannedOperation], problem: AttentionProblem, policy: Policy
) -> Callable[[str], Placement]:
    """Return a function from a method to its placement.

    'auto' is 'gather', except while generating with split keys: then it is 'split_kv' if the method can run it and it sends
    fewer bytes. Errors: ShardingError as the policy requires, ConfigError for a strategy that contradicts the operation.
    """
    declared = declared_strategy(operation, policy.sequence_parallel)

    def place(strategy: str, strict: bool = policy.strict) -> Placement:
        return place_problem(
            problem, strict=strict, kv_heads=policy.kv_heads, strategy=strategy, ring_order=policy.ring_order
        )

    if declared != "auto" or problem.mode not in GENERATION:
        only = place("gather" if declared == "auto" else declared)
        return lambda _: only
    # strict applies only to the chosen strategy.
    merged = place("split_kv", strict=False)
    if merged.sequence.strategy != "split_kv":  # the keys aren't split
        only = place("gather")
        return lambda _: only
    merging, gathering = _sent(problem, merged)
    scope = "device and batch row" if is_symbolic(merged.local.batch) else "device"
    sizes = f"merging sends {bytes_text(merging)} per {scope}, gathering the keys {bytes_text(gathering)}"

    def choose(method: str) -> Placement:
        reasons = sequence_reasons(operation, problem, merged, method, declared, None)
        if reasons:
            against = "; ".join(reason.message.removeprefix(f"{MERGING}: ") for reason in reasons)
            return because("gather", f"keys are gathered, not outputs merged: {against}")
        if merging >= gathering:
            return because("gather", f"keys are gathered: {sizes}")
        return because("split_kv", f"outputs are merged: {sizes}")

    def because(strategy: str, why: str) -> Placement:
        placement = place(strategy)
        return replace(placement, changes=(*placement.changes, f"sequence_parallel='auto': {why}"))

    return choose


def _sent(problem: AttentionProblem, merged: Placement) -> tuple[float, float]:
    """Bytes sent per device in the forward pass: (outputs in the softmax dtype and two numbers per row, keys and values).

    Of one batch row if the batch is symbolic: both grow with it.
    """
    local, shards = merged.local, merged.sequence.shards
    local = local._replace(batch=1) if is_symbolic(local.batch) else local
    rows = local.batch * local.q_heads * local.q_len
    item, wide = (jnp.dtype(name).itemsize for name in (problem.runtime_dtype, problem.softmax_dtype))
    merging = 2 * rows * (problem.value_dim + 2) * wide * (shards - 1) / shards
    if merged.sequence.gathered_queries:
        merging += rows * problem.head_dim * item * (shards - 1) / shards
    dims = {"key": problem.head_dim, "value": problem.token_dim - problem.head_dim}
    width = sum(dim * (problem.itemsize_of(n) if n in problem.quantised else item) for n, dim in dims.items())
    width += 4 * len(problem.scales)
    return merging, local.batch * local.kv_heads * local.kv_len * width * (shards - 1)
