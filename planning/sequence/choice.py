"""Where a plan's methods would have the tensors of a split sequence: as declared, or, for 'auto', as sends the least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from ...errors import ConfigError
from ...sharding.modes import GENERATION
from ..operation import PlannedOperation
from ..placement import Placement, place_problem
from ..problem import AttentionProblem
from ..text import bytes_text
from .reasons import MERGING, sequence_reasons

if TYPE_CHECKING:
    from ..policy import Policy

__all__ = ["declared_strategy", "placements"]


def declared_strategy(operation: type[PlannedOperation], declared: str) -> str:
    """The operation's own strategy, else what metadata declares. Errors: ConfigError where both have one and they differ."""
    own = operation.sequence_parallel
    if own is not None and declared not in ("auto", own):
        raise ConfigError(
            f"operation {operation.name!r} is sequence_parallel={own!r} by its name, and {declared!r} is declared; leave "
            f"sequence_parallel out, or create an operation that takes it, such as 'splash'."
        )
    return own or declared


def placements(
    operation: type[PlannedOperation], problem: AttentionProblem, policy: Policy
) -> Callable[[str], Placement]:
    """A function from a method to the placement that it would get.

    'auto' is 'gather', but while generating, where keys are split: there it is 'split_kv' if the method can, and if that sends
    fewer bytes. Errors: ShardingError where the policy says so, ConfigError for a strategy that contradicts the operation.
    """
    declared = declared_strategy(operation, policy.sequence_parallel)

    def place(strategy: str, strict: bool = policy.strict) -> Placement:
        return place_problem(
            problem, strict=strict, kv_heads=policy.kv_heads, strategy=strategy, ring_order=policy.ring_order
        )

    if declared != "auto" or problem.mode not in GENERATION:
        only = place("gather" if declared == "auto" else declared)
        return lambda _: only
    # What is strict holds for the one that is chosen.
    merged = place("split_kv", strict=False)
    if merged.sequence.strategy != "split_kv":  # the keys aren't split
        only = place("gather")
        return lambda _: only
    merging, gathering = _sent(problem, merged)
    sizes = f"merging sends {bytes_text(merging)} a device, gathering the keys {bytes_text(gathering)}"

    def choose(method: str) -> Placement:
        reasons = sequence_reasons(operation, problem, merged, method, None)
        if reasons:
            against = "; ".join(reason.message.removeprefix(f"{MERGING}: ") for reason in reasons)
            return because("gather", f"keys are gathered, and outputs not merged: {against}")
        if merging >= gathering:
            return because("gather", f"keys are gathered: {sizes}")
        return because("split_kv", f"outputs are merged: {sizes}")

    def because(strategy: str, why: str) -> Placement:
        placement = place(strategy)
        return replace(placement, changes=(*placement.changes, f"sequence_parallel='auto': {why}"))

    return choose


def _sent(problem: AttentionProblem, merged: Placement) -> tuple[float, float]:
    """Bytes that a device sends forward: (the outputs in the softmax dtype with two numbers a row, all keys and values)."""
    local, shards = merged.local, merged.sequence.shards
    rows = local.batch * local.q_heads * local.q_len
    item, wide = (jnp.dtype(name).itemsize for name in (problem.runtime_dtype, problem.softmax_dtype))
    merging = 2 * rows * (problem.value_dim + 2) * wide * (shards - 1) / shards
    if merged.sequence.gathered_queries:
        merging += rows * problem.head_dim * item * (shards - 1) / shards
    of_key, of_value = (problem.itemsize_of(n) if n in problem.quantised else item for n in ("key", "value"))
    width = problem.head_dim * of_key + problem.value_dim * of_value + 4 * len(problem.scales)
    return merging, local.batch * local.kv_heads * local.kv_len * width * (shards - 1)
