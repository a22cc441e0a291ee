"""The blocks that splash uses if none are declared: from the local shapes, the device's VMEM and the mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ...devices import vmem_of
from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ..choices.mask_blocks import fitted_block
from .pass_cost import forward_cost, has_full_tiles, is_short_tile, tile_cost
from .pass_fields import DQ
from .pipelining import SUBLANES, ComputeBlock, Pipelining, choose_pipelining
from .scalar_memory import ScalarMemory
from .sizes import BlockSizes, choose_block, dividing_block
from .splash_config import LANES, SplashConfig
from .vmem_count import ROOM, counted_vmem, vmem_need, vmem_room

__all__ = ["packed_heads", "resolve_attnops"]

# From the static cycles of the compiled kernels (benchmarks/splash.md): a product over half of a 1024-block at a time lets the
# compiler overlap the softmax of one half with the products of the other.
_SIZES, _COMPUTE = (1024, 512, 256, 128), 512
_WIDE = 2048  # with pipelined tiles, each of which starts and ends with sub-tiles that don't overlap
# No faster, but lists of long sequences, or of many rows, find room in scalar memory.
_LARGE = (2048, 4096)
_COMPUTE_IN = {"TPU7x": 256}  # fewest static cycles there; elsewhere the whole sub-tile
_ROWS = 1024  # of a tile, over all its heads
_PARTS = 8  # of the keys; each is a kernel to compile
_MIB = 1 << 20


class _MaxBlocks(NamedTuple):
    """The largest block, the largest of the forward pass, the largest of queries in the backward pass, and whether variants are
    bounded, too.
    """

    size: int
    forward: int
    rows: int
    bounded: bool


def resolve_attnops(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> SplashConfig:
    """Fill in every field for attnops' kernels. Errors: ConfigError for sizes that can't work together, or too many tiles."""
    vmem, scalars = vmem_of(problem.device_kind), ScalarMemory(problem, placement)
    needs: list[tuple[int, SplashConfig]] = []
    errors: list[ConfigError] = []
    for candidate in _candidates(problem, placement, config):
        try:
            if isinstance(candidate, ConfigError):
                raise candidate
            scalars.check(candidate)  # slow if there are many tiles, so not checked for every config
            needs.append((vmem_need(problem, placement, candidate), candidate))
        except ConfigError as error:
            errors.append(error)
            continue
        if needs[-1][0] <= vmem_room(problem, config):
            break
    else:
        if not needs:
            raise errors[-1]  # that of the largest blocks
        needs.append(min(needs, key=lambda needed: needed[0]))  # the plan notes that it doesn't fit
    need, resolved = needs[-1]
    if config.is_set("vmem_limit_bytes") or need <= vmem.default:
        return resolved
    return resolved.with_fields({"vmem_limit_bytes": min(vmem.maximum, math.ceil(need / _MIB) * _MIB)})


def _candidates(
    problem: AttentionProblem, placement: Placement, config: SplashConfig
) -> Iterator[SplashConfig | ConfigError]:
    """Configs in the order in which they are tried, and why some sizes give none: the cheapest first, the large ones last."""
    begin = _max_block(problem)
    first = tuple(n for n in _SIZES if n <= begin)
    forward = begin
    if begin == _SIZES[0] and choose_pipelining(problem, config).transposed:
        first = (_WIDE, *first)
        forward = _WIDE if has_full_tiles(problem, placement) else begin
    for sizes in (first, *((size,) for size in (*_SIZES[::-1], *_LARGE) if size > begin)):
        candidates = []
        for max_size, fused in itertools.product(sizes, _fused_options(config)):
            if sizes is first:
                largest = _MaxBlocks(max_size, min(max_size, forward), min(max_size, _SIZES[0]), True)
            else:
                largest = _MaxBlocks(max_size, max_size, max_size, False)
            try:
                candidates.append(_with_blocks(problem, placement, config, largest, fused))
            except ConfigError as error:
                yield error
        yield from sorted(candidates, key=lambda candidate: forward_cost(problem, placement, candidate))


def _max_block(problem: AttentionProblem) -> int:
    """The largest size to begin with. It doesn't exceed blocks chosen at run time, whose cost isn't known."""
    if "chosen_blocks" not in problem.features:
        return _SIZES[0]
    return max(LANES, *(fitted_block(problem.mask, axis, _SIZES[0], _SIZES[0] + 1, LANES) for axis in ("q", "kv")))


def _fused_options(config: SplashConfig) -> tuple[bool, ...]:
    """Whether the backward pass is fused: as declared, else fused if it fits."""
    if config.is_set("use_fused_bwd_kernel"):
        return (bool(config.use_fused_bwd_kernel),)
    if config.block_kv_dkv_sums is not None:
        return (True,)
    separate = any(config.is_set(name) for name in DQ.sizes)
    return (False,) if separate else (True, False)


def _with_blocks(
    problem: AttentionProblem, placement: Placement, config: SplashConfig, largest: _MaxBlocks, fused: bool
) -> SplashConfig:
    max_size, max_forward = largest.size, largest.forward
    pipelining = choose_pipelining(problem, config)
    q_len, kv_len = placement.local.q_len, placement.local.kv_len
    sizes = BlockSizes(config)
    # Blocks that a declared inner block divides.
    sizes.fill("block_q", choose_block(q_len, max_forward, math.lcm(LANES, config.block_q_compute or 1)))
    sizes.fill("heads_per_tile", packed_heads(problem, placement, sizes["block_q"])[-1], 1)
    inner = math.lcm(LANES, config.block_kv_compute_in or 1)
    outer = math.lcm(inner, config.block_kv_compute or 1)
    rows = sizes["block_q"] * sizes["heads_per_tile"]
    sizes.fill("block_kv", _block_of_keys(problem, placement, largest, (sizes["block_q"], rows), outer, "forward"))
    block = sizes["block_q"], sizes["block_kv"]
    declared = config.block_q_compute, config.block_kv_compute
    compute = _compute_block_for_mask(problem, placement, block, pipelining.compute_blocks, declared)
    keys = (
        max(_COMPUTE // 2, block[1] // 2) if pipelining.transposed else max_size
    )  # at least a few sub-tiles, to overlap
    sizes.fill_inner("block_q_compute", "block_q", compute.queries)
    sizes.fill_inner("block_kv_compute", "block_kv", min(compute.keys, keys), inner)
    sizes.fill_inner("block_kv_compute_in", "block_kv_compute", _COMPUTE_IN.get(problem.device_kind, max_size))
    sizes.fill("products_ahead", compute.pipeline_depth, 0)
    multiple = math.lcm(LANES, config.block_q_dkv_compute or 1)
    same = config.is_set("block_q") and multiple == LANES
    sizes.fill("block_q_dkv", sizes["block_q"] if same else choose_block(q_len, largest.rows, multiple))
    multiple = math.lcm(LANES, config.block_kv_dkv_compute or 1)
    sums, rows = config.block_kv_dkv_sums, sizes["block_q_dkv"]
    keys = _block_of_keys(problem, placement, largest, (rows, rows), multiple, "backward")
    sizes.fill("block_kv_dkv", keys if sums is None else dividing_block(sums, keys, multiple))
    block = sizes["block_q_dkv"], sizes["block_kv_dkv"]
    declared = config.block_q_dkv_compute, config.block_kv_dkv_compute
    compute = _compute_block_for_mask(
        problem,
        placement,
        block,
        pipelining.compute_blocks_dkv if fused else pipelining.compute_blocks_separate,
        declared,
    )
    sizes.fill("products_ahead_dkv", compute.pipeline_depth, 0)
    sizes.fill_inner("block_kv_dkv_compute", "block_kv_dkv", min(compute.keys, max_size))
    sizes.fill_inner("block_q_dkv_compute", "block_q_dkv", compute.queries)
    if not fused:
        sizes.fill("block_q_dq", sizes["block_q_dkv"])
        # Large blocks only if there would be too many small ones: a step of this pass has few products.
        keys = max_size if max_size in _LARGE else min(_COMPUTE, max_size)
        sizes.fill("block_kv_dq", choose_block(kv_len, keys, math.lcm(LANES, config.block_kv_dq_compute or 1)))
        sizes.fill_inner("block_kv_dq_compute", "block_kv_dq", min(_COMPUTE, max_size))
    switches = {
        "use_fused_bwd_kernel": fused,
        "transposed_tiles": pipelining.transposed,
        "sum_by_product": _row_sum_on_mxu(problem, config, pipelining),
        "stationary_weights": _stationary_operand(problem, config),
    }
    resolved = config.with_fields(sizes.values | switches)
    if not fused or config.is_set("block_kv_dkv_sums"):
        return resolved
    return _with_key_sums(problem, placement, resolved, may_halve=not config.is_set("block_kv_dkv"))


def _block_of_keys(
    problem: AttentionProblem,
    placement: Placement,
    largest: _MaxBlocks,
    rows: tuple[int, int],
    multiple: int,
    part: str,
) -> int:
    """The largest block of keys, or half of a wide one if the code for a tile would be too long.

    rows: queries of a block, and of all heads that share a tile.
    """
    kv_len = placement.local.kv_len
    max_size = largest.forward if part == "forward" else largest.size
    block = rows[0], choose_block(kv_len, max_size, multiple)
    if not largest.bounded or max_size != _WIDE:
        return block[1]
    short = is_short_tile(problem, placement, block, part, rows[1] // rows[0])
    return block[1] if short else choose_block(kv_len, _WIDE // 2, multiple)


def packed_heads(problem: AttentionProblem, placement: Placement, block_q: int) -> list[int]:
    """Heads of a group that may share a tile, fewest first: 1, or in calls of few queries as many as make up a large tile.

    A tile of few queries waits for its keys, which heads that share a tile fetch once. Only where no gradient is planned:
    the choice was made by forward passes.
    """
    local = placement.local
    if problem.mode == "__train__" or local.q_len > _ROWS // 2:
        return [1]
    group = max(1, local.q_heads // local.kv_heads)
    return [n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * block_q <= _ROWS)]


def _compute_block_for_mask(
    problem: AttentionProblem,
    placement: Placement,
    block: tuple[int, int],
    compute_blocks: tuple[ComputeBlock, ...],
    declared: tuple[int | None, int | None],
) -> ComputeBlock:
    """Of the compute blocks that agree with what is declared the cheapest in these blocks of queries and keys: what small ones
    leave out of the mask, against what they cost.
    """
    agreeing = [
        compute_block
        for compute_block in compute_blocks
        if all(n in (None, compute) for n, compute in zip(declared, compute_block[:2], strict=True))
    ]

    def cost(compute_block: ComputeBlock) -> float:
        size = dividing_block(block[0], compute_block.queries), dividing_block(block[1], compute_block.keys)
        return compute_block.cost * tile_cost(problem, placement, block, size)

    return min(agreeing, key=cost) if len(agreeing) > 1 else (agreeing or compute_blocks)[0]


def _with_key_sums(
    problem: AttentionProblem, placement: Placement, config: SplashConfig, may_halve: bool
) -> SplashConfig:
    """As few parts of the keys as fit with their sums in the fused backward pass, with half the keys in a block if no number
    fits otherwise; all keys if none fits then. Half a block still takes fewer static cycles than two kernels.
    """
    for block in _blocks_of_sums(config) if may_halve else (config.block_kv_dkv or LANES,):
        blocks = math.ceil(placement.local.kv_len / block)
        for parts in range(1, min(_PARTS, blocks) + 1):
            sums = None if parts == 1 else math.ceil(blocks / parts) * block
            candidate = config.with_fields({"block_kv_dkv": block, "block_kv_dkv_sums": sums})
            if counted_vmem(problem, placement, candidate, backward=True) * ROOM <= vmem_room(problem, config):
                return candidate
    return config


def _blocks_of_sums(config: SplashConfig) -> tuple[int, ...]:
    """The block of keys, and half of it if its sub-tiles allow."""
    assert config.block_kv_dkv is not None
    half, left = divmod(config.block_kv_dkv, 2)
    whole_subtiles = not left and half % (config.block_kv_dkv_compute or half) == 0 and half % LANES == 0
    return (config.block_kv_dkv, half) if whole_subtiles else (config.block_kv_dkv,)


def _stationary_operand(problem: AttentionProblem, config: SplashConfig) -> bool:
    """As declared; else True if the head dims leave columns of the matrix unit idle: 256 on v6e and tpu7x, 128 before.

    Transposed, the products then fill the columns with rows of the tile.
    """
    if config.is_set("stationary_weights"):
        return bool(config.stationary_weights)
    columns = 256 if problem.device_kind in ("TPU v6 lite", "TPU7x") else 128
    return max(problem.head_dim, problem.value_dim) < columns


def _row_sum_on_mxu(problem: AttentionProblem, config: SplashConfig, pipelining: Pipelining) -> bool:
    """As declared; else with transposed tiles, where the ones are rows that stream past, and on v6e without them if the
    product with the values leaves half of the matrix unit's 256 columns idle. Not on tpu7x, which adds up products elsewhere.
    """
    if config.is_set("sum_by_product"):
        return bool(config.sum_by_product)
    if "dropout" in problem.features:
        return False
    if pipelining.transposed:
        return problem.value_dim % SUBLANES == 0
    return problem.value_dim % 256 == 128 and problem.device_kind == "TPU v6 lite"
