"""How queries that are split over devices see all keys: which strategies there are, and what stands against one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .capability import Reason
from .problem import AttentionProblem

if TYPE_CHECKING:
    from .placement import Placement

__all__ = ["STRATEGIES", "hops_of", "sequence_reasons"]

STRATEGIES = ("gather", "ring", "ulysses")
_NOT_AROUND = {
    "bias": "a dense bias",
    "return_weights": "the attention weights",
    "quantized_kv": "quantised keys and values",
}


def hops_of(problem: AttentionProblem, shards: int) -> tuple[int, ...]:
    """How far, in shards, keys have to come around a ring, 0 first: the distances at which some device may see something."""
    every = tuple(range(shards))
    if problem.dynamic_query_offset or "mask_function" in problem.features or problem.kv_len % shards:
        return every
    static = problem.mask.split_static()[0]
    live = static.live_blocks(
        problem.q_len // shards,
        problem.kv_len // shards,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        query_offset=problem.query_offset or 0,
    )
    rows = np.arange(shards)
    return (0, *(d for d in every[1:] if (live[rows, (rows - d) % shards] > 0).any()))


def sequence_reasons(problem: AttentionProblem, placement: Placement, method: str) -> tuple[Reason, ...]:
    """Why a method can't have the strategy that a placement is made for."""
    if placement.strategy not in ("ring", "ulysses", "merge"):
        return ()
    strategy, shards, over = placement.strategy, placement.sequence_shards, "+".join(placement.sequence_axes)
    on_parts = strategy in ("ring", "merge")
    said = "keys that stay split" if strategy == "merge" else f"sequence_parallel={strategy!r}"
    elsewhere = "Declare sequence_parallel='gather'."
    found = []
    if on_parts and not problem.operation.works_on_parts(method, problem.config, strategy):
        found.append(
            Reason(
                f"{strategy}.parts",
                "sequence_parallel",
                f"{said}: this method (with this config) can't work on parts of the keys",
                f"{elsewhere} vanilla, and splash with its own kernels, can.",
            )
        )
    if problem.kv_len % shards:
        found.append(
            Reason(
                f"{strategy}.kv_len",
                "kv_len",
                f"{said}: {problem.kv_len} keys don't divide over the {shards} devices of {over}",
                f"Pad the keys to a multiple of {shards}. {elsewhere}",
            )
        )
    for feature, what in _NOT_AROUND.items():
        if feature in problem.features and (strategy == "ring" or feature == "return_weights"):
            found.append(Reason(f"{strategy}.{feature}", feature, f"{said}: there is no way for {what}", elsewhere))
    if on_parts and problem.softmax_dtype not in ("float32", "float64"):
        found.append(
            Reason(
                f"{strategy}.softmax_dtype",
                "runtime_softmax_dtype",
                f"{said}: this merges outputs by a log-sum-exp, which {problem.softmax_dtype} is too coarse for",
                "Leave runtime_softmax_dtype at float32.",
            )
        )
    heads = placement.outer_kv_heads
    if strategy == "ulysses" and heads % shards:
        found.append(
            Reason(
                "ulysses.kv_heads",
                "kv_heads",
                f"{said}: the {heads} kv heads of a device don't divide over the {shards} devices of {over}",
                "Declare sequence_parallel='ring', or split the sequence over fewer devices.",
            )
        )
    return tuple(found)
