"""The operations of a call's products, counted by attnops where the compiler doesn't count them; and their precision."""

from __future__ import annotations

import math

from ..planning import Plan
from .tile_counts import tiles_of

__all__ = ["attention_flops", "exact_products"]

_TILE = 128  # if the implementation has no tiles of its own
# Per kernel: its blocks, how many products have the head dim, and how many the value dim.
_FORWARD = (("block_q", "block_kv", 1, 1),)
_KERNELS = (("block_q_dkv", "block_kv_dkv", 2, 2), ("block_q_dq", "block_kv_dq", 2, 1))
_AT_ONCE = (("block_q", "block_kv", 3, 2),)
_FUSED = (("block_q_dkv", "block_kv_dkv", 3, 2),)


def attention_flops(plan: Plan, backward: bool) -> float:
    """Operations of one device, where all have the same number; a multiply-add counts as two. Whole tiles that may be live are
    counted: by the mask as far as it is known before the run, in the implementation's tiles. If attnops' TPU kernels leave
    out parts of tiles, only the computed parts are counted.

    backward: with the gradient. Separate kernels for key and value and for the query make seven products, everything else at
    least five; the forward pass makes two.
    """
    problem, config = plan.problem, plan.config
    sizes = {axis.name: axis.size for axis in problem.mesh}
    devices = math.prod(sizes[axis] for axis in plan.placement.axes)
    passes = list(_FORWARD)
    if backward:
        apart, fused = (getattr(config, name, None) for name in ("block_q_dq", "use_fused_bwd_kernel"))
        passes += _KERNELS if apart else _FUSED if fused else _AT_ONCE
    total = 0.0
    for q_name, kv_name, dims, value_dims in passes:
        weights = _weights(plan, q_name, kv_name)
        total += 2.0 * weights * (dims * problem.head_dim + value_dims * problem.value_dim)
    return total * problem.batch * problem.q_heads / devices


def exact_products(plan: Plan) -> bool:
    """Whether float32 products keep full precision: attnops' kernels request that. Elsewhere it isn't assumed."""
    if plan.problem.runtime_dtype != "float32":
        return False
    if plan.method == "forward_cuda":
        return plan.problem.operation != "sdpa"
    return plan.method == "forward_tpu" and getattr(plan.config, "kernel", None) == "attnops"


def _weights(plan: Plan, q_name: str, kv_name: str) -> int:
    """Weights per head, in tiles that may be live, by the fields with their sizes."""
    problem, config = plan.problem, plan.config
    q_len, kv_len, offset = problem.q_len, problem.kv_len, problem.query_offset or 0
    block_q, block_kv = (getattr(config, name, None) or _TILE for name in (q_name, kv_name))
    unit = [getattr(config, f"{name}_compute", None) for name in (q_name, kv_name)]
    if unit[1] is not None and _exact_tiles(plan):
        whole = (block_q, block_kv), (unit[0] or block_q, unit[1])
        bodies, counts, _ = tiles_of(problem.mask, *whole, q_len, kv_len, offset, tables=problem.kv_heads)
        return round(sum(n * body.live for n, body in zip(counts, bodies, strict=True)) * block_q * block_kv)
    block_q, block_kv = min(block_q, q_len), min(block_kv, kv_len)
    if problem.dynamic_query_offset:
        return math.ceil(q_len / block_q) * block_q * math.ceil(kv_len / block_kv) * block_kv
    kinds = problem.mask.live_blocks(block_q, block_kv, q_len=q_len, kv_len=kv_len, query_offset=offset)
    return int((kinds > 0).sum()) * block_q * block_kv


def _exact_tiles(plan: Plan) -> bool:
    """Whether attnops' TPU kernels run, and the host knows which parts of tiles they leave out."""
    own = plan.method == "forward_tpu" and getattr(plan.config, "kernel", None) == "attnops"
    return own and plan.problem.mask.is_static and not plan.problem.dynamic_query_offset
