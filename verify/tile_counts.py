"""How often a pass's kernels run each of their parts: tiles, blocks and heads, times the static cycles of each."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError
from ..planning import AttentionProblem, OperationConfig, Placement
from .generations import matrix_depth, products_a_cycle
from .static_clock import TileCycles

__all__ = ["kernel_cycles", "kernels_of", "key_parts", "matrix_cycles"]

# How many of a tile's products sum over the head dim, sum over the value dim, and have either as their rows.
_PRODUCTS = {"forward": (1, 0, 0, 1), "backward": (1, 1, 2, 1), "dkv": (1, 1, 1, 1), "dq": (1, 1, 1, 0)}

# The splash kernels of each part: their blocks, and the axis that they go along.
_KERNELS = {
    "forward": {"attnops_splash_forward": ("block_q", "block_kv", 0)},
    "backward": {
        "attnops_splash_backward": ("block_q_dkv", "block_kv_dkv", 0),
        "attnops_splash_dkv": ("block_q_dkv", "block_kv_dkv", 1),
        "attnops_splash_dq": ("block_q_dq", "block_kv_dq", 0),
    },
}


def kernels_of(part: str, config: OperationConfig) -> tuple[str, ...]:
    """The kernels that a pass runs with a resolved config. Errors: ConfigError for an operation without any."""
    fused = getattr(config, "use_fused_bwd_kernel", None)
    if fused is None:
        raise ConfigError(f"{config.operation} has no kernels whose schedule can be read; time it on the device.")
    if part == "forward":
        return tuple(_KERNELS[part])
    return ("attnops_splash_backward",) if fused else ("attnops_splash_dkv", "attnops_splash_dq")


def kernel_cycles(
    problem: AttentionProblem, placement: Placement, config: OperationConfig, part: str, kernel: str, cycles: TileCycles
) -> int:
    """A kernel's cycles for one device's part of the problem."""
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
    parts = key_parts(config, local.kv_len) if products == "backward" else 1  # each part goes over all queries
    return cycles.total(full * tiles, masked * tiles, parts * kinds.shape[slow] * tiles, heads=parts * kv_tiles)


def key_parts(config: OperationConfig, kv_len: int) -> int:
    """How many parts a resolved config's fused backward pass splits the keys into."""
    sums = getattr(config, "block_kv_dkv_sums", None)
    return math.ceil(kv_len / sums) if sums else 1


def matrix_cycles(kind: str, products: str, block_q: int, block_kv: int, head_dim: int, value_dim: int) -> int:
    """The least cycles of a core's matrix units for one head's tile, in bfloat16, by the products that they issue.

    products: those of the forward pass, of a fused backward pass ("backward"), or of one of the two kernels ("dkv", "dq"). A sum
    over a head dim fills whole depths of a unit, 128 or, from v6e on, 256; a product of 16 rows (vmatmul) is issued
    every 8 cycles on each of two units. Where the head dim is the rows or columns, it streams past the weights.
    """
    depth = matrix_depth(kind)
    columns = math.ceil(head_dim / depth) * depth, math.ceil(value_dim / depth) * depth, head_dim, value_dim
    weight = sum(count * dim for count, dim in zip(_PRODUCTS[products], columns, strict=True))
    return math.ceil(block_q * block_kv * weight / products_a_cycle(kind))
