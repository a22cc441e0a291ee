"""How the Hopper kernel's part of a FlashAttention2Config is filled in."""

from __future__ import annotations

import itertools
from typing import Any

from ...devices import gpu_specs, gpu_variant
from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ..choices.mask_blocks import fitted_block
from ..flash.flash_config import FlashAttention2Config
from ..flash.flash_sizes import resolve_flash
from .kernel.hopper_sizes import KEYS, ROWS, HopperSizes, padded_dim, shared_bytes

__all__ = ["FORWARD", "candidates_near", "columns", "resolve_hopper", "shared_of", "tiles_of"]

FORWARD = ("block_q", "block_kv", "num_stages")
# (keys of a tile, stages) by the greatest dim of a head, best first: what doesn't fit into shared memory or registers is passed
# over. One stage is loaded while another is read; two more tiles fit at 64, where a tile takes half the time.
_TILES = ((128, 3), (128, 2), (64, 3), (64, 2), (64, 1))
_STAGES_FROM_DIM = 64
# Registers of a thread that computes: the sums of a row's values, its logits, and its weights as 16-bit numbers.
_REGISTERS = 192


def resolve_hopper(
    problem: AttentionProblem, placement: Placement, config: FlashAttention2Config
) -> FlashAttention2Config:
    """Fill in every size, those of the gradients as the kernels in Triton choose them. Errors: ConfigError if none fits."""
    gradients = resolve_flash(
        problem,
        placement,
        config.with_fields({**dict.fromkeys((*FORWARD, "num_warps")), "fold": False, "kv_splits": 1}),
    )
    sizes = _chosen(problem, placement, config)
    fields = {"kernel": "mosaic", "num_warps": None, **dict(zip(FORWARD, sizes, strict=True))}
    resolved = gradients.with_fields(fields)
    _check_fits(problem, sizes)
    return resolved


def tiles_of(config: FlashAttention2Config) -> HopperSizes:
    """The sizes of a filled config."""
    assert config.block_q is not None
    assert config.block_kv is not None
    assert config.num_stages is not None
    return HopperSizes(config.block_q, config.block_kv, config.num_stages)


def columns(problem: AttentionProblem) -> tuple[int, int]:
    """The columns of a tile of the query and of the output."""
    return padded_dim(problem.head_dim), padded_dim(problem.value_dim)


def shared_of(problem: AttentionProblem, sizes: HopperSizes) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold."""
    return shared_bytes(sizes, problem.head_dim, problem.value_dim)


def candidates_near(sizes: HopperSizes) -> list[HopperSizes]:
    """Sizes around some, the nearest first."""
    keys = (sizes.block_kv, sizes.block_kv * 2, sizes.block_kv // 2)
    stages = (sizes.stages, sizes.stages + 1, sizes.stages - 1)
    blocks = (sizes.block_q, 2 * ROWS if sizes.block_q == ROWS else ROWS)
    made = itertools.product(blocks, stages, keys)
    return [HopperSizes(q, kv, n) for q, n, kv in made if n >= 1 and kv in KEYS]


def _chosen(problem: AttentionProblem, placement: Placement, config: FlashAttention2Config) -> HopperSizes:
    local = placement.local
    block_q = config.block_q or (2 * ROWS if local.q_len > ROWS else ROWS)
    most_keys = KEYS[0] if local.kv_len <= KEYS[0] else KEYS[-1]
    found: list[HopperSizes] = []
    for keys, stages in _TILES:
        if stages > 2 and keys > 64 and max(columns(problem)) > _STAGES_FROM_DIM:
            continue
        block_kv = config.block_kv or _of_mask(problem, min(keys, most_keys))
        sizes = HopperSizes(block_q, block_kv, config.num_stages or stages)
        found.append(sizes)
        if _fits(problem, sizes):
            return sizes
    return found[-1]


def _of_mask(problem: AttentionProblem, size: int) -> int:
    """Keys of a tile that lie in one block of the mask, unless its blocks are smaller than a tile can be."""
    fitted = fitted_block(problem.mask, "kv", size, problem.kv_len, KEYS[0])
    return 1 << (fitted.bit_length() - 1)


def _shared_limit(problem: AttentionProblem) -> int:
    """Bytes of shared memory that a block of threads may request; Hopper's, if the device isn't known, in the interpreter."""
    gpu = gpu_variant(problem.device_kind) or gpu_variant(gpu_specs()["h100"].kind)
    assert gpu is not None
    return gpu.shared_bytes_a_block


def _registers(problem: AttentionProblem, sizes: HopperSizes) -> int:
    """A thread's numbers: of a warpgroup's 64 rows, 128 threads hold half a row each."""
    return columns(problem)[1] // 2 + sizes.block_kv // 2 + sizes.block_kv // 4


def _fits(problem: AttentionProblem, sizes: HopperSizes) -> bool:
    shared = sum(shared_of(problem, sizes).values())
    return shared <= _shared_limit(problem) and _registers(problem, sizes) <= _REGISTERS


def _check_fits(problem: AttentionProblem, sizes: HopperSizes) -> None:
    """Errors: ConfigError for sizes whose tiles take more shared memory than there is."""
    parts, limit = shared_of(problem, sizes), _shared_limit(problem)
    taken = sum(parts.values())
    if taken > limit:
        held = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
        raise ConfigError(
            f"FlashAttention2Config: block_q={sizes.block_q}, block_kv={sizes.block_kv} and num_stages={sizes.stages} take "
            f"{taken} bytes of shared memory ({held}); {problem.device} has {limit} for a block of threads. Hint: fewer stages "
            "or a smaller block."
        )


def fields_of(sizes: HopperSizes) -> dict[str, Any]:
    """The sizes as a config's fields."""
    return dict(zip(FORWARD, sizes, strict=True))
