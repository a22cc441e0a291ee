"""How often a pass's kernels run each of their parts: tiles, blocks and heads, times the static cycles of each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..masks import Mask
from ..planning import AttentionProblem, OperationConfig, PassSizes, Placement
from ..planning.implementations import PRODUCTS
from .generations import matrix_depth, products_a_cycle
from .static_clock import TileCycles

if TYPE_CHECKING:
    from ..operators.splash.kernel.variants import KernelVariant

__all__ = ["kernel_bodies", "kernel_cycles", "key_parts", "key_turns", "matrix_cycles", "tiles_of"]


def kernel_cycles(
    problem: AttentionProblem,
    placement: Placement,
    config: OperationConfig,
    kernel: PassSizes,
    cycles: TileCycles,
    compiled: tuple[KernelVariant, ...] | None = None,
) -> int:
    """Cycles of a kernel for one device's part of the problem.

    cycles: of the kernel as it is compiled for the problem; or, for a problem like it with another mask, of a kernel whose
    bodies are `compiled`, from which those of others are estimated.
    """
    sizes: Any = config
    local, tile = placement.local, sizes.heads_per_tile or 1
    products, block_q, block_kv, slow = kernel.products, kernel.block_q, kernel.block_kv, kernel.outer
    unit = kernel.compute_q or block_q, kernel.compute_kv or block_kv
    offset = None if problem.dynamic_query_offset else problem.query_offset or 0
    kv_tiles = local.kv_heads // max(1, tile * local.kv_heads // local.q_heads)
    arguments = problem.mask, (block_q, block_kv), unit, local.q_len, local.kv_len, offset, slow, kv_tiles
    bodies, counts, slow_blocks = tiles_of(*arguments)
    parts = key_parts(config, local.kv_len) if products == "backward" else 1  # each goes over all queries
    if compiled is None and parts > 1:  # the first of them was read
        compiled = tiles_of(*arguments, key_blocks=sizes.block_kv_dkv_sums // block_kv)[0]
    if compiled is not None and compiled != bodies:
        cycles = cycles._replace(tiles=_estimated(bodies, compiled, cycles.tiles))
    min_cycles = tile * matrix_cycles(
        problem.device_kind, products, block_q, block_kv, problem.head_dim, problem.value_dim
    )
    cycles = cycles.at_least([math.ceil(min_cycles * body.computed) for body in bodies])
    tiles = local.batch * local.q_heads // tile
    turns = key_turns(config, local.kv_len) * local.batch * local.kv_heads if products == "backward" else 0
    return cycles.total(
        [round(n * tiles) for n in counts], parts * slow_blocks * tiles, parts * local.batch * kv_tiles, turns
    )


def kernel_bodies(kernel: PassSizes, mask: Mask, length: int) -> tuple[KernelVariant, ...]:
    """The bodies of a kernel that is compiled for so many queries and keys."""
    block = kernel.block_q, kernel.block_kv
    unit = kernel.compute_q or kernel.block_q, kernel.compute_kv or kernel.block_kv
    return tiles_of(mask, block, unit, length, length, 0)[0]


def tiles_of(
    mask: Mask,
    block: tuple[int, int],
    unit: tuple[int, int],
    q_len: int,
    kv_len: int,
    query_offset: int | None,
    slow: str = "q",
    tables: int = 1,
    key_blocks: int | None = None,
) -> tuple[tuple[KernelVariant, ...], list[float], int]:
    """(bodies, the tiles of each, blocks of the slow axis) of splash's kernels, by the queries and keys of blocks and units.

    query_offset: None if it is traced. What is known only when the program runs counts as masked. tables: parts of the heads
    that have lists of their own if heads see blocks of their own; the tiles are then those of their mean. key_blocks: only the
    first so many blocks of keys.
    """
    from ..operators.kernels.local_mask import LocalMask
    from ..operators.splash.kernel.schedule import run_time_variants, tile_variants, variants_of_part

    local = LocalMask(mask, 0, q_len, kv_len, query_offset or 0)
    if not mask.is_static or query_offset is None:
        visible = mask.live_blocks(*block, q_len=q_len, kv_len=kv_len, query_offset=query_offset or 0) > 0
        if query_offset is None:
            visible = np.ones_like(visible)
        of_block = block[0] // unit[0], block[1] // unit[1]
        bodies = run_time_variants(local, unit, (visible.shape[0], visible.shape[1]), of_block)
        return bodies, [0.0] * (len(bodies) - 1) + [float(visible.sum())], visible.shape[0 if slow == "q" else 1]
    bodies, numbers = tile_variants(local, block, unit, tables if local.heads_differ else 1)
    bodies, numbers = variants_of_part(bodies, numbers[..., :key_blocks])
    counts = np.bincount(np.asarray(numbers).reshape(-1), minlength=len(bodies) + 1)[1:]
    return bodies, [n / numbers.shape[1] for n in counts.tolist()], numbers.shape[2 if slow == "q" else 3]


def _estimated(
    bodies: tuple[KernelVariant, ...], known: tuple[KernelVariant, ...], cycles: tuple[int, ...]
) -> tuple[int, ...]:
    """Cycles of bodies, derived from those of others: a cost for the computed part of a tile, and one for the masked part; from
    those of a single one by their work.
    """
    if len(known) == 1:
        return tuple(round(cycles[0] * body.work / known[0].work) for body in bodies)
    shares = np.array([[body.computed, body.masked] for body in known])
    factors, *_ = np.linalg.lstsq(shares, np.array(cycles, float), rcond=None)
    return tuple(round(float(body.computed * factors[0] + body.masked * max(factors[1], 0.0))) for body in bodies)


def key_parts(config: Any, kv_len: int) -> int:
    """How many parts a resolved config's fused backward pass splits the keys into."""
    sums = config.block_kv_dkv_sums
    return math.ceil(kv_len / sums) if sums else 1


def key_turns(config: Any, kv_len: int) -> int:
    """How often the loops of a fused backward pass go round that clear and write the gradients of a kv head's keys."""
    from ..operators.splash.kernel.key_sums import leaving_rows

    block, part = config.block_kv_dkv, config.block_kv_dkv_sums or kv_len
    lengths = ((start, math.ceil(min(part, kv_len - start) / block) * block) for start in range(0, kv_len, part))
    return sum(rows // leaving_rows(rows, start) for start, rows in lengths)


def matrix_cycles(kind: str, products: str, block_q: int, block_kv: int, head_dim: int, value_dim: int) -> int:
    """The least cycles of a core's matrix units for one head's tile, in bfloat16, by the products that they issue.

    products: those of the forward pass, of a fused backward pass ("backward"), or of one of the two kernels ("dkv", "dq"). A sum
    over a head dim fills whole depths of a unit, 128 or, from v6e on, 256; a product of 16 rows (vmatmul) is issued
    every 8 cycles on each of two units. Where the head dim is the rows or columns, it streams past the weights.
    """
    depth = matrix_depth(kind)
    columns = math.ceil(head_dim / depth) * depth, math.ceil(value_dim / depth) * depth, head_dim, value_dim
    weight = sum(count * dim for count, dim in zip(PRODUCTS[products], columns, strict=True))
    return math.ceil(block_q * block_kv * weight / products_a_cycle(kind))
