"""What a pass of splash over a mask's tiles costs, and how long the code for a tile is."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from ...masks import Mask
from ...planning import AttentionProblem, Placement
from .sizes import dividing_block
from .splash_config import LANES, SplashConfig

if TYPE_CHECKING:
    from .kernel.variants import KernelVariant

__all__ = ["forward_cost", "has_full_tiles", "is_short_code", "is_short_tile", "tile_cost"]

# In weights of a tile without a mask: a step of the grid beside its tile (half a microsecond; not measured on a TPU). Two
# passes make seven products where the fused one makes five.
_STEP, _SEPARATE = 1 << 17, 1.4
_FILL = 1 << 18  # extra cost of the start and end of a pipelined tile: 415 cycles on v6e at head dim 128
# The most weights in one variant of a forward tile, and of a backward one, whose code is twice as long: compile time is in
# proportion to them (benchmarks/tpu_compile.py), and cycles hardly are.
_CODE = {"forward": 1 << 21, "backward": 1 << 20}
# Queries and keys of the largest forward tile if the mask leaves out sub-tiles of every tile of that size: all code is then for
# edges, and few tiles use it. Larger ones take fewer cycles, but about twice as long to compile.
_EDGE = 1 << 10
_UNIT = 256  # of queries and of keys, the least
_SAMPLE = 1 << 14  # rows and keys sampled to find a mask's costs


def forward_cost(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> float:
    """The work of a pass over the tiles that the mask leaves; two backward passes make more products than the fused one."""
    assert config.block_q is not None
    assert config.block_kv is not None
    separate_cost = 1.0 if config.use_fused_bwd_kernel else _SEPARATE
    # Each part of the keys goes over all queries.
    again = math.ceil(placement.local.kv_len / (config.block_kv_dkv_sums or placement.local.kv_len)) - 1
    again *= math.ceil(min(placement.local.q_len, _SAMPLE) / config.block_q)
    fill = _FILL if config.transposed_tiles else 0
    subtile = config.block_q_compute or config.block_q, config.block_kv_compute or config.block_kv
    return (
        separate_cost * tile_cost(problem, placement, (config.block_q, config.block_kv), subtile, fill) + again * _STEP
    )


def tile_cost(
    problem: AttentionProblem, placement: Placement, block: tuple[int, int], subtile: tuple[int, int], fill: int = 0
) -> float:
    """The work of a pass, in weights: large blocks take fewer steps, small ones skip more, as do small sub-tiles within them.

    block, sub-tile: of queries and keys. fill: cost per tile, besides its step.
    """
    if "mask_function" in problem.features:  # it would be evaluated weight by weight
        return 1 / math.prod(block)
    place = {"query_offset": problem.query_offset or 0, **_sample(problem, placement)}
    return sum(
        count * (variant.work * math.prod(block) + _STEP + fill)
        for variant, count in _variants(problem.mask, block, subtile, tuple(place.items()))
    )


@functools.lru_cache(maxsize=256)
def _variants(
    mask: Mask, block: tuple[int, int], subtile: tuple[int, int], place: tuple[tuple[str, int], ...]
) -> tuple[tuple[KernelVariant, float], ...]:
    """Each variant with the mean number of a head's tiles that use it."""
    from .kernel.variants import variants_of  # Pallas comes with the package

    tiles = _tiles(mask, block, subtile, place)
    variants, numbers = variants_of(tiles)
    return tuple((variant, float((numbers == i).sum()) / len(tiles)) for i, variant in enumerate(variants, 1))


@functools.lru_cache(maxsize=256)
def _full_tiles(
    mask: Mask, block: tuple[int, int], subtile: tuple[int, int], place: tuple[tuple[str, int], ...]
) -> bool:
    """Whether something is visible in every sub-tile of some tile."""
    return bool((_tiles(mask, block, subtile, place) > 0).all((-2, -1)).any())


def _tiles(
    mask: Mask, block: tuple[int, int], subtile: tuple[int, int], place: tuple[tuple[str, int], ...]
) -> np.ndarray:
    """The kinds of each tile's sub-tiles: [heads, q blocks, kv blocks, sub-tiles of queries, sub-tiles of keys]."""
    from .kernel.variants import cells

    at = dict(place)
    count = math.ceil(at["q_len"] / block[0]), math.ceil(at["kv_len"] / block[1])
    kinds = mask.live_blocks_by_head(*subtile, **at)
    return cells(kinds, count, (block[0] // subtile[0], block[1] // subtile[1]))


def _sample(problem: AttentionProblem, placement: Placement) -> dict[str, int]:
    """A sample of a device's rows and keys: the last rows if rows or keys are split, and the keys near their positions."""
    q_len, kv_len = (min(length, _SAMPLE) for length in (placement.local.q_len, placement.local.kv_len))
    q_start = problem.q_len - q_len if placement.q_axes else 0
    k_start = min(max(0, q_start + q_len + (problem.query_offset or 0) - kv_len), problem.kv_len - kv_len)
    return {"q_len": q_len, "kv_len": kv_len, "q_start": q_start, "k_start": k_start}


def is_short_code(problem: AttentionProblem, placement: Placement, config: SplashConfig, part: str) -> bool:
    """Whether the code for a tile of a resolved config's 'forward' or 'backward' pass is as short as the heuristic's."""
    if part == "backward":
        assert config.block_q_dkv is not None
        assert config.block_kv_dkv is not None
        return is_short_tile(problem, placement, (config.block_q_dkv, config.block_kv_dkv), part)
    assert config.block_q is not None
    assert config.block_kv is not None
    block = config.block_q, config.block_kv
    if math.prod(block) > _EDGE**2 and not has_full_tiles(problem, placement):
        return False
    return is_short_tile(problem, placement, block, part, config.heads_per_tile or 1)


def has_full_tiles(problem: AttentionProblem, placement: Placement) -> bool:
    """Whether the mask computes, or may compute, all sub-tiles of some tile of 1024 x 1024, or of all tokens if they are
    fewer.
    """
    if "mask_function" in problem.features:
        return True
    local = placement.local
    q, kv = (min(_EDGE, math.ceil(length / LANES) * LANES) for length in (local.q_len, local.kv_len))
    return _full_tiles(problem.mask, (q, kv), *_seen(problem, placement, (q, kv)))


def _max_computed(problem: AttentionProblem, placement: Placement, block: tuple[int, int]) -> float:
    """The largest share of a tile that a variant computes in the smallest sub-tiles."""
    variants = _variants(problem.mask, block, *_seen(problem, placement, block))
    return max((variant.computed for variant, _ in variants), default=0.0)


def _seen(
    problem: AttentionProblem, placement: Placement, block: tuple[int, int]
) -> tuple[tuple[int, int], tuple[tuple[str, int], ...]]:
    """The smallest sub-tiles of a tile, and the sample of rows and keys."""
    place = {"query_offset": problem.query_offset or 0, **_sample(problem, placement)}
    return (dividing_block(block[0], _UNIT), dividing_block(block[1], _UNIT)), tuple(place.items())


def is_short_tile(
    problem: AttentionProblem, placement: Placement, block: tuple[int, int], part: str, heads: int = 1
) -> bool:
    """Whether the largest variant of a tile, of so many heads, computes few enough weights in the smallest sub-tiles."""
    visible = 1.0 if "mask_function" in problem.features else _max_computed(problem, placement, block)
    return heads * visible * math.prod(block) <= _CODE[part]
