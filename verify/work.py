"""The operations of a call's products, counted by attnops where the compiler doesn't count them; and their precision."""

from __future__ import annotations

import math
from typing import Any

from ..planning import PassSizes, Plan
from ..planning.decision import Decision
from .tile_counts import tiles_of

__all__ = ["attention_flops", "exact_products"]


def attention_flops(plan: Plan, backward: bool) -> float:
    """Operations of one device, where all have the same number; a multiply-add counts as two. Whole tiles that may be live are
    counted: by the mask as far as it is known before the run, in the implementation's tiles. If kernels leave out parts of tiles,
    only the computed parts are counted.

    backward: with the gradient. Separate kernels for key and value and for the query make seven products, everything else at
    least five; the forward pass makes two.
    """
    problem, runs = plan.problem, plan.runs
    if runs is None:
        return 0.0
    sizes = {axis.name: axis.size for axis in problem.mesh}
    devices = math.prod(sizes[axis] for axis in plan.placement.axes)
    total = 0.0
    for kernel in (*runs.passes(plan.config, False), *(runs.passes(plan.config, True) if backward else ())):
        dims = kernel.head_dims * problem.head_dim + kernel.value_dims * problem.value_dim
        total += 2.0 * _weights(plan, kernel) * dims
    return total * problem.batch * problem.q_heads / devices


def exact_products(plan: Decision[Any, Any]) -> bool:
    """Whether float32 products keep full precision: attnops' kernels request that. Elsewhere it isn't assumed."""
    return plan.problem.runtime_dtype == "float32" and plan.runs is not None and plan.runs.exact_products


def _weights(plan: Plan, kernel: PassSizes) -> int:
    """Weights per head, in tiles that may be live."""
    problem, selected = plan.problem, plan.problem.operand("selected")
    if selected is not None:  # as many as can be
        return problem.q_len * min(problem.kv_len, selected.shape[-1])
    q_len, kv_len, offset = problem.q_len, problem.kv_len, problem.query_offset or 0
    is_static = problem.mask.is_static and not problem.dynamic_query_offset
    if kernel.compute_q is not None and kernel.compute_kv is not None and is_static:
        block_sizes = (kernel.block_q, kernel.block_kv), (kernel.compute_q, kernel.compute_kv)
        bodies, counts, _ = tiles_of(problem.mask, *block_sizes, q_len, kv_len, offset, tables=problem.kv_heads)
        return round(
            sum(n * body.computed for n, body in zip(counts, bodies, strict=True)) * kernel.block_q * kernel.block_kv
        )
    block_q, block_kv = min(kernel.block_q, q_len), min(kernel.block_kv, kv_len)
    if problem.dynamic_query_offset:
        return math.ceil(q_len / block_q) * block_q * math.ceil(kv_len / block_kv) * block_kv
    kinds = problem.mask.live_blocks(block_q, block_kv, q_len=q_len, kv_len=kv_len, query_offset=offset)
    return int((kinds > 0).sum()) * block_q * block_kv
