"""How often a pass's kernels run each of their parts: tiles, blocks and heads, times the static cycles of each."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError
from ..planning import AttentionProblem, OperationConfig, Placement
from .generations import matrix_depth, products_a_cycle
from .static_clock import TileCycles

__all__ = ["kernel_cycles", "kernels_of", "key_parts", "matrix_cycles"]

# Of a tile's products, how many sum over the head dim, over the value dim, and have one of each for their rows.
_PRODUCTS = {"forward": (1, 0, 0, 1), "backward": (1, 1, 2, 1), "dkv": (1, 1, 1, 1), "dq": (1, 1, 1, 0)}

# The splash kernels of each part: their blocks, and the axis by which they go.
_KERNELS = {
    "forward": {"attnops_splash_forward": ("block_q", "block_kv", 0)},
    "backward": {
        "attnops_splash_backward": ("block_q_dkv", "block_kv_dkv", 0),
        "attnops_splash_dkv": ("block_q_dkv", "block_kv_dkv", 1),
        "attnops_splash_dq": ("block_q_dq", "block_kv_dq", 0),
    },
}


def kernels_of(part: str, config: OperationConfig) -> tuple[str, ...]:
    """The kernels that a pass runs with a resolved config. Errors: ConfigError for an operation that has none."""
    fused = getattr(config, "use_fused_bwd_kernel", None)
    if fused is None:
        raise ConfigError(f"{config.operation} has no kernels whose schedule could be read; it is timed on the device.")
    if part == "forward":
        return tuple(_KERNELS[part])
    return ("attnops_splash_backward",) if fused else ("attnops_splash_dkv", "attnops_splash_dq")


def kernel_cycles(
    problem: AttentionProblem, placement: Placement, config: OperationConfig, part: str, kernel: str, cycles: TileCycles
) -> int:
    """Cycles of a kernel for one device's part of the problem."""
    sizes: Any = config
    local, tile = placement.local, sizes.heads_per_tile or 1
    q_name, kv_name, slow = _KERNELS[part][kernel]
    kinds = problem.mask.live_blocks(
        getattr(sizes, q_name),
        getattr(sizes, kv_name),
        q_len=local.q_len,
        kv_len=local.kv_len,
        query_offset=problem.query_offset or 0,
    )
    products = kernel.removeprefix("attnops_splash_")
    least = matrix_cycles(
        problem.device_kind,
        products,
        getattr(sizes, q_name),
        getattr(sizes, kv_name),
        problem.head_dim,
        problem.value_dim,
    )
    cycles = cycles.at_least(tile * least)
    tiles = local.batch * local.q_heads // tile
    kv_tiles = local.batch * local.kv_heads // max(1, tile * local.kv_heads // local.q_heads)
    full, masked = int((kinds == 2).sum()), int((kinds == 1).sum())
    parts = key_parts(config, local.kv_len) if products == "backward" else 1  # each goes over all queries
    return cycles.total(full * tiles, masked * tiles, parts * kinds.shape[slow] * tiles, heads=parts * kv_tiles)


def key_parts(config: OperationConfig, kv_len: int) -> int:
    """In how many parts a resolved config's fused backward takes the keys."""
    sums = getattr(config, "block_kv_dkv_sums", None)
    return math.ceil(kv_len / sums) if sums else 1


def matrix_cycles(kind: str, products: str, block_q: int, block_kv: int, head_dim: int, value_dim: int) -> int:
    """The cycles that a core's matrix units need at least for one head's tile, in bfloat16, counted by the products they issue.

    products: those of the forward pass, of a backward pass that is fused ("backward"), or of one of two ("dkv", "dq"). What
    sums over a head dim fills whole depths of a unit, 128 or, from v6e on, 256, where a product of 16 rows (vmatmul) is issued
    every 8 cycles on each of two units. What has the head dim for its rows or columns streams past the weights.
    """
    depth = matrix_depth(kind)
    columns = math.ceil(head_dim / depth) * depth, math.ceil(value_dim / depth) * depth, head_dim, value_dim
    weight = sum(count * dim for count, dim in zip(_PRODUCTS[products], columns, strict=True))
    return math.ceil(block_q * block_kv * weight / products_a_cycle(kind))
