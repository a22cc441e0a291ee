"""The blocks that splash uses if none are declared: from the local shapes, the device's VMEM and the mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ...devices import vmem_of
from ...errors import ConfigError
from ...planning import AttentionProblem, OperationConfig, Placement
from ..choices.mask_blocks import fitted_block
from .pass_cost import forward_cost, has_full_tiles, is_short_tile, tile_cost
from .pass_fields import DQ
from .scalar_memory import ScalarMemory
from .sizes import BlockSizes, choose_block, dividing_block
from .splash_config import LANES, SplashConfig
from .tile_way import SUBLANES, TileWay, Units, way_of_tiles
from .vmem_count import ROOM, counted_vmem, vmem_need, vmem_room

__all__ = ["heads_together", "resolve_attnops"]

# From the static cycles of the compiled kernels (benchmarks/splash.md): a product over half of a 1024-block at a time lets the
# compiler overlap the softmax of one half with the products of the other.
_SIZES, _COMPUTE = (1024, 512, 256, 128), 512
_WIDE = 2048  # with pipelined tiles, each of which starts and ends with units that don't overlap
# No faster, but lists of long sequences, or of many rows, find room in scalar memory.
_LARGE = (2048, 4096)
_COMPUTE_IN = {"TPU7x": 256}  # fewest static cycles there; elsewhere the whole unit
_ROWS = 1024  # of a tile, over all its heads
_PARTS = 8  # of the keys; each is a kernel to compile
_MIB = 1 << 20


class _Most(NamedTuple):
    """The largest block, the largest of the forward pass, the largest of queries in the backward pass, and whether bodies are
    bounded, too.
    """

    size: int
    forward: int
    rows: int
    bounded: bool


def resolve_attnops(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> OperationConfig:
    """Fill in every field for attnops' kernels. Errors: ConfigError for sizes that can't work together, or too many tiles."""
    vmem, scalars = vmem_of(problem.device_kind), ScalarMemory(problem, placement)
    needs: list[tuple[int, SplashConfig]] = []
    errors: list[ConfigError] = []
    for way in _ways(problem, placement, config):
        try:
            if isinstance(way, ConfigError):
                raise way
            scalars.check(way)  # slow if there are many tiles, so not checked for every config
            needs.append((vmem_need(problem, placement, way), way))
        except ConfigError as error:
            errors.append(error)
            continue
        if needs[-1][0] <= vmem_room(problem, config):
            break
    else:
        if not needs:
            raise errors[-1]  # that of the largest blocks
        needs.append(min(needs, key=lambda one: one[0]))  # the plan notes that it doesn't fit
    need, resolved = needs[-1]
    if config.is_set("vmem_limit_bytes") or need <= vmem.default:
        return resolved
    return resolved.with_fields({"vmem_limit_bytes": min(vmem.maximum, math.ceil(need / _MIB) * _MIB)})


def _ways(
    problem: AttentionProblem, placement: Placement, config: SplashConfig
) -> Iterator[SplashConfig | ConfigError]:
    """Configs in the order in which they are tried, and why some sizes give none: the cheapest first, the large ones last."""
    begin = _most_for(problem)
    first = tuple(n for n in _SIZES if n <= begin)
    forward = begin
    if begin == _SIZES[0] and way_of_tiles(problem, config).transposed:
        first = (_WIDE, *first)
        forward = _WIDE if has_full_tiles(problem, placement) else begin
    for sizes in (first, *((size,) for size in (*_SIZES[::-1], *_LARGE) if size > begin)):
        found = []
        for most, fused in itertools.product(sizes, _backward_ways(config)):
            if sizes is first:
                largest = _Most(most, min(most, forward), min(most, _SIZES[0]), True)
            else:
                largest = _Most(most, most, most, False)
            try:
                found.append(_with_blocks(problem, placement, config, largest, fused))
            except ConfigError as error:
                yield error
        yield from sorted(found, key=lambda way: forward_cost(problem, placement, way))


def _most_for(problem: AttentionProblem) -> int:
    """The largest size to begin with. It doesn't exceed blocks chosen at run time, whose cost isn't known."""
    if "chosen_blocks" not in problem.features:
        return _SIZES[0]
    return max(LANES, *(fitted_block(problem.mask, axis, _SIZES[0], _SIZES[0] + 1, LANES) for axis in ("q", "kv")))


def _backward_ways(config: SplashConfig) -> tuple[bool, ...]:
    """Whether the backward pass is fused: as declared, else fused if it fits."""
    if config.is_set("use_fused_bwd_kernel"):
        return (bool(config.use_fused_bwd_kernel),)
    if config.block_kv_dkv_sums is not None:
        return (True,)
    apart = any(config.is_set(name) for name in DQ.sizes)
    return (False,) if apart else (True, False)


def _with_blocks(
    problem: AttentionProblem, placement: Placement, config: SplashConfig, largest: _Most, fused: bool
) -> SplashConfig:
    most, most_forward = largest.size, largest.forward
    way = way_of_tiles(problem, config)
    q_len, kv_len = placement.local.q_len, placement.local.kv_len
    sizes = BlockSizes(config)
    # Blocks that a declared inner block divides.
    sizes.fill("block_q", choose_block(q_len, most_forward, math.lcm(LANES, config.block_q_compute or 1)))
    sizes.fill("heads_per_tile", heads_together(problem, placement, sizes["block_q"])[-1], 1)
    inner = math.lcm(LANES, config.block_kv_compute_in or 1)
    outer = math.lcm(inner, config.block_kv_compute or 1)
    rows = sizes["block_q"] * sizes["heads_per_tile"]
    sizes.fill("block_kv", _block_of_keys(problem, placement, largest, (sizes["block_q"], rows), outer, "forward"))
    block = sizes["block_q"], sizes["block_kv"]
    declared = config.block_q_compute, config.block_kv_compute
    units = _units_for_mask(problem, placement, block, way.units, declared)
    keys = max(_COMPUTE // 2, block[1] // 2) if way.transposed else most  # at least a few units, to overlap
    sizes.fill_inner("block_q_compute", "block_q", units.queries)
    sizes.fill_inner("block_kv_compute", "block_kv", min(units.keys, keys), inner)
    sizes.fill_inner("block_kv_compute_in", "block_kv_compute", _COMPUTE_IN.get(problem.device_kind, most))
    sizes.fill("products_ahead", units.ahead, 0)
    unit = math.lcm(LANES, config.block_q_dkv_compute or 1)
    same = config.is_set("block_q") and unit == LANES
    sizes.fill("block_q_dkv", sizes["block_q"] if same else choose_block(q_len, largest.rows, unit))
    unit = math.lcm(LANES, config.block_kv_dkv_compute or 1)
    sums, rows = config.block_kv_dkv_sums, sizes["block_q_dkv"]
    keys = _block_of_keys(problem, placement, largest, (rows, rows), unit, "backward")
    sizes.fill("block_kv_dkv", keys if sums is None else dividing_block(sums, keys, unit))
    block = sizes["block_q_dkv"], sizes["block_kv_dkv"]
    declared = config.block_q_dkv_compute, config.block_kv_dkv_compute
    units = _units_for_mask(problem, placement, block, way.units_dkv if fused else way.units_apart, declared)
    sizes.fill("products_ahead_dkv", units.ahead, 0)
    sizes.fill_inner("block_kv_dkv_compute", "block_kv_dkv", min(units.keys, most))
    sizes.fill_inner("block_q_dkv_compute", "block_q_dkv", units.queries)
    if not fused:
        sizes.fill("block_q_dq", sizes["block_q_dkv"])
        # Large blocks only if there would be too many small ones: a step of this pass has few products.
        keys = most if most in _LARGE else min(_COMPUTE, most)
        sizes.fill("block_kv_dq", choose_block(kv_len, keys, math.lcm(LANES, config.block_kv_dq_compute or 1)))
        sizes.fill_inner("block_kv_dq_compute", "block_kv_dq", min(_COMPUTE, most))
    switches = {
        "use_fused_bwd_kernel": fused,
        "transposed_tiles": way.transposed,
        "sum_by_product": _sums_by_product(problem, config, way),
        "stationary_weights": _stationary_weights(problem, config),
    }
    resolved = config.with_fields(sizes.found | switches)
    assert isinstance(resolved, SplashConfig)
    if not fused or config.is_set("block_kv_dkv_sums"):
        return resolved
    return _with_sums(problem, placement, resolved, may_halve=not config.is_set("block_kv_dkv"))


def _block_of_keys(
    problem: AttentionProblem, placement: Placement, largest: _Most, rows: tuple[int, int], unit: int, part: str
) -> int:
    """The largest block of keys, or half of a wide one if the code for a tile would be too long.

    rows: queries of a block, and of all heads that share a tile.
    """
    kv_len = placement.local.kv_len
    most = largest.forward if part == "forward" else largest.size
    block = rows[0], choose_block(kv_len, most, unit)
    if not largest.bounded or most != _WIDE:
        return block[1]
    short = is_short_tile(problem, placement, block, part, rows[1] // rows[0])
    return block[1] if short else choose_block(kv_len, _WIDE // 2, unit)


def heads_together(problem: AttentionProblem, placement: Placement, block_q: int) -> list[int]:
    """Heads of a group that may share a tile, fewest first: 1, or in calls of few queries as many as make up a large tile.

    A tile of few queries waits for its keys, which heads that share a tile fetch once. Only where no gradient is planned:
    the choice was made by forward passes.
    """
    local = placement.local
    if problem.mode == "__train__" or local.q_len > _ROWS // 2:
        return [1]
    group = max(1, local.q_heads // local.kv_heads)
    return [n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * block_q <= _ROWS)]


def _units_for_mask(
    problem: AttentionProblem,
    placement: Placement,
    block: tuple[int, int],
    units: tuple[Units, ...],
    declared: tuple[int | None, int | None],
) -> Units:
    """Of the units that agree with what is declared the cheapest in these blocks of queries and keys: what small ones leave out
    of the mask, against what they cost.
    """
    agreeing = [unit for unit in units if all(n in (None, own) for n, own in zip(declared, unit[:2], strict=True))]

    def cost(unit: Units) -> float:
        size = dividing_block(block[0], unit.queries), dividing_block(block[1], unit.keys)
        return unit.cost * tile_cost(problem, placement, block, size)

    return min(agreeing, key=cost) if len(agreeing) > 1 else (agreeing or units)[0]


def _with_sums(problem: AttentionProblem, placement: Placement, config: SplashConfig, may_halve: bool) -> SplashConfig:
    """As few parts of the keys as fit with their sums in the fused backward pass, with half the keys in a block if no number
    fits otherwise; all keys if none fits then. Half a block still takes fewer static cycles than two kernels.
    """
    for block in _blocks_of_sums(config) if may_halve else (config.block_kv_dkv or LANES,):
        blocks = math.ceil(placement.local.kv_len / block)
        for parts in range(1, min(_PARTS, blocks) + 1):
            sums = None if parts == 1 else math.ceil(blocks / parts) * block
            found = config.with_fields({"block_kv_dkv": block, "block_kv_dkv_sums": sums})
            assert isinstance(found, SplashConfig)
            if counted_vmem(problem, placement, found, backward=True) * ROOM <= vmem_room(problem, config):
                return found
    return config


def _blocks_of_sums(config: SplashConfig) -> tuple[int, ...]:
    """The block of keys, and half of it if its units allow."""
    assert config.block_kv_dkv is not None
    half, left = divmod(config.block_kv_dkv, 2)
    whole_units = not left and half % (config.block_kv_dkv_compute or half) == 0 and half % LANES == 0
    return (config.block_kv_dkv, half) if whole_units else (config.block_kv_dkv,)


def _stationary_weights(problem: AttentionProblem, config: SplashConfig) -> bool:
    """As declared; else True if the head dims leave columns of the matrix unit idle: 256 on v6e and tpu7x, 128 before.

    Transposed, the products then fill the columns with rows of the tile.
    """
    if config.is_set("stationary_weights"):
        return bool(config.stationary_weights)
    columns = 256 if problem.device_kind in ("TPU v6 lite", "TPU7x") else 128
    return max(problem.head_dim, problem.value_dim) < columns


def _sums_by_product(problem: AttentionProblem, config: SplashConfig, way: TileWay) -> bool:
    """As declared; else with transposed tiles, where the ones are rows that stream past, and on v6e without them if the
    product with the values leaves half of the matrix unit's 256 columns idle. Not on tpu7x, which adds up products elsewhere.
    """
    if config.is_set("sum_by_product"):
        return bool(config.sum_by_product)
    if "dropout" in problem.features:
        return False
    if way.transposed:
        return problem.value_dim % SUBLANES == 0
    return problem.value_dim % 256 == 128 and problem.device_kind == "TPU v6 lite"
