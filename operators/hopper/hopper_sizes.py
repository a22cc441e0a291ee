"""How the Hopper kernels' part of a FlashAttention2Config is filled in."""

from __future__ import annotations

import itertools
from typing import Any

from ...devices import gpu_specs, gpu_variant
from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ..choices.mask_blocks import fitted_block
from ..flash.flash_config import FlashAttention2Config
from ..flash.pass_fields import FIELDS
from .kernel.hopper_sizes import KEYS, ROWS, HopperSizes, HopperTiles, divided, padded_dim, shared_bytes

__all__ = [
    "HOPPER_FIELDS",
    "WARPS",
    "candidates_near",
    "columns",
    "fields_of",
    "resolve_hopper",
    "shared_of",
    "tiles_of",
]

# The fields of a HopperSizes, as a config has them for each pass; the warps follow from them.
WARPS = tuple(names[2] for names in FIELDS.values())
HOPPER_FIELDS = {which: tuple(name for name in names if name not in WARPS) for which, names in FIELDS.items()}
# By pass, best first: what doesn't fit into shared memory or registers is passed over. One stage is loaded while another is read;
# two more tiles fit at 64, where a tile takes half the time.
_TILES = {
    "forward": tuple(HopperSizes(2 * ROWS, *rest) for rest in ((128, 3), (128, 2), (64, 3), (64, 2), (64, 1))),
    "dkv": (
        HopperSizes(128, 2 * ROWS, 2),
        *(HopperSizes(64, *rest) for rest in ((2 * ROWS, 3), (2 * ROWS, 2), (ROWS, 2), (ROWS, 1))),
    ),
    "dq": tuple(HopperSizes(2 * ROWS, *rest) for rest in ((128, 2), (64, 3), (64, 2), (64, 1))),
}
_STAGES_FROM_DIM = 64
# What takes registers beside the numbers that are counted: then a tile for the gradients of key and value has 64 rows.
_IN_REGISTERS = frozenset({
    "segment_ids", "positions", "dense_mask", "blocks", "chosen_blocks", "bias", "score", "logits_soft_cap", "dropout",
})  # fmt: skip
# Registers of a thread that computes, for the numbers that `_registers` counts.
_REGISTERS = {"forward": 192, "dkv": 224, "dq": 208}


def resolve_hopper(
    problem: AttentionProblem, placement: Placement, config: FlashAttention2Config
) -> FlashAttention2Config:
    """Fill in every size. Errors: ConfigError if none fits."""
    fields: dict[str, Any] = {"kernel": "mosaic", "fold": False, "kv_splits": 1}
    for which in HOPPER_FIELDS:
        sizes = _chosen(which, problem, placement, config)
        _check_fits(which, problem, sizes)
        fields |= fields_of(which, sizes)
    return config.with_fields(fields)


def tiles_of(config: FlashAttention2Config) -> HopperTiles:
    """The sizes of a filled config."""
    return HopperTiles(
        **{which: HopperSizes(*(getattr(config, name) for name in names)) for which, names in HOPPER_FIELDS.items()}
    )


def fields_of(which: str, sizes: HopperSizes) -> dict[str, Any]:
    """The sizes of a pass as a config's fields."""
    return dict(zip(HOPPER_FIELDS[which], sizes, strict=True))


def columns(problem: AttentionProblem) -> tuple[int, int]:
    """The columns of a tile of the query and of the output."""
    return padded_dim(problem.head_dim), padded_dim(problem.value_dim)


def shared_of(which: str, problem: AttentionProblem, sizes: HopperSizes) -> dict[str, int]:
    """Bytes of shared memory of a block of threads, by what they hold."""
    return shared_bytes(which, sizes, problem.head_dim, problem.value_dim)


def candidates_near(which: str, sizes: HopperSizes) -> list[HopperSizes]:
    """Sizes around some, the nearest first."""
    keys = [n for n in (sizes.block_kv, sizes.block_kv * 2, sizes.block_kv // 2) if n in KEYS]
    blocks = [n for n in (sizes.block_q, sizes.block_q * 2, sizes.block_q // 2) if ROWS <= n <= 2 * ROWS]
    stages = [n for n in (sizes.stages, sizes.stages + 1, sizes.stages - 1) if n >= 1]
    if which == "dkv":
        keys = [n for n in keys if n <= 2 * ROWS]
    return [HopperSizes(q, kv, n) for q, n, kv in itertools.product(blocks, stages, keys)]


def _chosen(which: str, problem: AttentionProblem, placement: Placement, config: FlashAttention2Config) -> HopperSizes:
    local = placement.local
    declared = [getattr(config, name) for name in HOPPER_FIELDS[which]]
    found: list[HopperSizes] = []
    for sizes in _TILES[which]:
        if sizes.stages > 2 and sizes.block_kv > 64 and max(columns(problem)) > _STAGES_FROM_DIM:
            continue
        if which == "dkv" and sizes.block_q > ROWS and problem.features & _IN_REGISTERS:
            continue
        rows = sizes.block_q if local.q_len > ROWS else ROWS
        keys = _of_mask(problem, sizes.block_kv if local.kv_len > ROWS else ROWS)
        tried = (rows, keys, sizes.stages)
        sizes = HopperSizes(*(x if given is None else given for given, x in zip(declared, tried, strict=True)))
        found.append(sizes)
        if _fits(which, problem, sizes):
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


def _registers(which: str, problem: AttentionProblem, sizes: HopperSizes) -> int:
    """A thread's numbers: sums, logits, the gradients of weights, and 16-bit weights. Of a warpgroup's 64 rows, 128 threads hold
    half a row each."""
    dim, value_dim = columns(problem)
    if which == "forward":
        return value_dim // 2 + sizes.block_kv // 2 + sizes.block_kv // 4
    if which == "dq":
        return dim // 2 + sizes.block_kv + sizes.block_kv // 4
    sums = max(dim, value_dim) if divided(dim, value_dim) else dim + value_dim
    return sums // 2 + sizes.block_q + sizes.block_q // 4


def _fits(which: str, problem: AttentionProblem, sizes: HopperSizes) -> bool:
    if which == "dkv" and divided(*columns(problem)) and sizes.block_kv != ROWS:
        return False
    shared = sum(shared_of(which, problem, sizes).values())
    return shared <= _shared_limit(problem) and _registers(which, problem, sizes) <= _REGISTERS[which]


def _check_fits(which: str, problem: AttentionProblem, sizes: HopperSizes) -> None:
    """Errors: ConfigError for sizes whose tiles take more shared memory than there is, and for keys that a block can't hold."""
    block_q, block_kv, stages = HOPPER_FIELDS[which]
    if which == "dkv" and divided(*columns(problem)) and sizes.block_kv != ROWS:
        raise ConfigError(
            f"FlashAttention2Config: {block_kv}={sizes.block_kv}, with head_dim={problem.head_dim} and value dim "
            f"{problem.value_dim}: the gradients of key and value are summed by a warpgroup each, of the same {ROWS} "
            f"keys. Hint: {block_kv}={ROWS}."
        )
    parts, limit = shared_of(which, problem, sizes), _shared_limit(problem)
    taken = sum(parts.values())
    if taken > limit:
        held = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
        raise ConfigError(
            f"FlashAttention2Config: {block_q}={sizes.block_q}, {block_kv}={sizes.block_kv} and {stages}={sizes.stages} take "
            f"{taken} bytes of shared memory ({held}); {problem.device} has {limit} for a block of threads. Hint: fewer stages "
            "or a smaller block."
        )
