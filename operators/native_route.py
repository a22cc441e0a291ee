"""The one rule that chooses how forward_native works: logits whole, in blocks, or a few queries against a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..registry import AttentionProblem, OperationConfig, Placement, Route

__all__ = ["NativeRoute", "native_route"]


@dataclass(frozen=True)
class NativeRoute(Route):
    """name: 'plain', 'blockwise' or 'decode'. Tiles: query rows, keys and kv heads worked on at once, forward (backward).

    All None where the logits are built whole.
    """

    block_q: int | None = None
    block_kv: int | None = None
    heads_per_tile: int | None = None
    block_q_backward: int | None = None
    block_kv_backward: int | None = None


# Below this the logits stay in a core's cache, and one batched product beats a loop over heads.
_PLAIN_BYTES = 2 << 20


def native_route(problem: AttentionProblem, placement: Placement, config: OperationConfig) -> NativeRoute:
    """Choose from what is known before the call; what the config declares is taken."""
    local = placement.local
    declared = getattr(config, "path", None) if config.operation == "vanilla" else None
    logits = local.batch * local.q_heads * local.q_len * local.kv_len * _itemsize(problem.softmax_dtype)
    if "return_weights" in problem.features:
        return NativeRoute("plain", "the attention weights are asked for, and only whole logits give them")
    if _itemsize(problem.softmax_dtype) < 4:
        return NativeRoute("plain", f"the blocks' softmax is float32 or wider, declared {problem.softmax_dtype}")
    if declared == "plain" or (declared is None and logits <= _PLAIN_BYTES):
        why = "declared" if declared else f"the logits take {logits / 2**20:.2g} MiB a device, at most 2"
        return NativeRoute("plain", why)
    group = local.q_heads // local.kv_heads
    why = "declared" if declared else f"the logits would take {logits / 2**20:.4g} MiB a device"
    size_q = getattr(config, "block_q", None) or max(16, 1024 // group)
    size_kv = getattr(config, "block_kv", None) or 512
    return NativeRoute("blockwise", why, _balanced(local.q_len, size_q), _balanced(local.kv_len, size_kv), 1, _balanced(local.q_len, size_q), _balanced(local.kv_len, size_kv))


def _itemsize(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]


def _balanced(length: int, most: int, unit: int = 8) -> int:
    """The block of at most about `most` that cuts a length into equal blocks with the least padding."""
    count = math.ceil(length / most)
    return math.ceil(math.ceil(length / count) / unit) * unit
