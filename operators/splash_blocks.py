"""Which blocks splash takes where none are declared: from the local shapes, the device's VMEM and the mask."""

from __future__ import annotations

import math

from ..errors import ConfigError
from ..registry import AttentionProblem, OperationConfig, Placement
from .splash_config import LANES, SplashConfig
from .splash_sizes import Sizes, choose_block, dividing_block
from .splash_vmem import ROOM, counted_vmem, vmem_need, vmem_room

__all__ = ["resolve_attnops", "tile_cost"]

# By the static cycles of the compiled kernels (docs/splash.md): half of a 1024-block in a product at a time leaves the
# compiler room to overlap the softmax of one half with the products of the other.
_SIZES, _COMPUTE = (1024, 512, 256, 128), 512
_COMPUTE_IN = {"TPU7x": 256}  # 5 % fewer cycles than with 512 there; 4 % more on a v5e
# In weights of a tile without a mask: what a masked one costs, and a step of the grid beside its tile (half a microsecond;
# not measured on a TPU). Two passes make seven products where the fused one makes five.
_PARTIAL, _STEP, _APART = 1.3, 1 << 17, 1.4
_SAMPLE = 1 << 14  # a mask's first rows and keys, from which its costs are known
_PARTS = 8  # of the keys, each a kernel that has to be compiled
_MIB = 1 << 20


def resolve_attnops(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> OperationConfig:
    """Fill in every field for attnops' kernels. Errors: ConfigError for sizes that can't work together, or too many tiles."""
    from .kernels.splash.vmem import vmem_of

    vmem = vmem_of(problem.device_kind)
    found = [_way(problem, placement, config, most, fused) for most in _SIZES for fused in _backward_ways(config)]
    errors = [way for way in found if isinstance(way, ConfigError)]
    ways = [way for way in found if isinstance(way, SplashConfig)]
    resolved, need = None, 0
    # The cheapest that fits. The smallest comes last whatever it costs: that it doesn't fit is noted in the plan.
    for way in (*sorted(ways, key=lambda way: _cost(problem, placement, way)), *ways[-1:]):
        try:
            _check_visits(problem, placement, way)  # takes its time where there are many tiles, so not of all of them
        except ConfigError as error:
            errors.append(error)
            continue
        resolved, need = way, vmem_need(problem, placement, way)
        if need <= vmem_room(problem, config):
            break
    if resolved is None:
        raise errors[0]
    if not config.is_set("vmem_limit_bytes") and need > vmem.default:
        resolved = resolved.with_fields({"vmem_limit_bytes": min(vmem.most, math.ceil(need / _MIB) * _MIB)})
    return resolved


def _way(
    problem: AttentionProblem, placement: Placement, config: SplashConfig, most: int, fused: bool
) -> SplashConfig | ConfigError:
    """The config with blocks of at most `most`, or why there is none."""
    try:
        return _with_blocks(problem, placement, config, most, fused)
    except ConfigError as error:
        return error


def _check_visits(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> None:
    """Refuse blocks whose numbers a visit's word can't hold, and lists that scalar memory can't."""
    from .kernels.splash.visits import MOST_KV_BLOCKS, MOST_Q_BLOCKS, MOST_WORDS

    local = placement.local
    traced = bool(problem.leaves) or problem.dynamic_query_offset
    for suffix in ("", "_dkv", "_dq"):
        blocks, counts = [], []
        for axis, length, most in (("q", local.q_len, MOST_Q_BLOCKS), ("kv", local.kv_len, MOST_KV_BLOCKS)):
            name = f"block_{axis}{suffix}"
            block = getattr(config, name)
            if block is None:
                break
            blocks.append(block)
            counts.append(math.ceil(length / block))
            if counts[-1] > most:
                raise ConfigError(
                    f"SplashConfig: {name}={block} cuts {length} rows into {counts[-1]} blocks; wanted at most {most}: "
                    f"{name}={math.ceil(length / most / LANES) * LANES} or more."
                )
        rows = local.batch if traced else 1
        if len(blocks) < 2 or rows * counts[0] * (counts[1] + 1) <= MOST_WORDS:
            continue
        tiles = counts[0] * counts[1]
        if "mask_function" not in problem.features and not placement.q_axes and not problem.dynamic_query_offset:
            kinds = problem.mask.live_blocks(
                *blocks, q_len=local.q_len, kv_len=local.kv_len, query_offset=problem.query_offset or 0
            )
            tiles = int((kinds > 0).sum())
        words = rows * (tiles + (counts[0] if traced else 0))
        if words > MOST_WORDS:
            raise ConfigError(
                f"SplashConfig: block_q{suffix}={blocks[0]}, block_kv{suffix}={blocks[1]} make {words} visits, whose list "
                f"scalar memory can't hold; wanted at most {MOST_WORDS}: larger blocks make fewer."
            )


def _cost(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> float:
    """The work of a pass over the tiles that the mask leaves; two backward passes make more products than the fused one."""
    assert config.block_q is not None
    assert config.block_kv is not None
    apart = 1.0 if config.use_fused_bwd_kernel else _APART
    # Each part of the keys goes over all queries.
    again = math.ceil(placement.local.kv_len / (config.block_kv_dkv_sums or placement.local.kv_len)) - 1
    again *= math.ceil(min(placement.local.q_len, _SAMPLE) / config.block_q)
    return apart * tile_cost(problem, placement, config.block_q, config.block_kv) + again * _STEP


def tile_cost(problem: AttentionProblem, placement: Placement, block_q: int, block_kv: int) -> float:
    """The work of a pass in weights: large blocks take few steps, small ones skip more."""
    if "mask_function" in problem.features:  # would be evaluated weight by weight
        return 1 / (block_q * block_kv)
    kinds = problem.mask.live_blocks(
        block_q,
        block_kv,
        q_len=min(placement.local.q_len, _SAMPLE),
        kv_len=min(placement.local.kv_len, _SAMPLE),
        query_offset=problem.query_offset or 0,
    )
    partial, full = float((kinds == 1).sum()), float((kinds == 2).sum())
    return (full + _PARTIAL * partial) * block_q * block_kv + (full + partial) * _STEP


def _backward_ways(config: SplashConfig) -> tuple[bool, ...]:
    """Whether the backward pass is fused: what is declared, else fused if it fits."""
    if config.is_set("use_fused_bwd_kernel"):
        return (bool(config.use_fused_bwd_kernel),)
    if config.block_kv_dkv_sums is not None:
        return (True,)
    apart = config.is_set("block_q_dq") or config.is_set("block_kv_dq")
    return (False,) if apart else (True, False)


def _with_blocks(
    problem: AttentionProblem, placement: Placement, config: SplashConfig, most: int, fused: bool
) -> SplashConfig:
    q_len, kv_len = placement.local.q_len, placement.local.kv_len
    sizes = Sizes(config)
    sizes.fill("heads_per_tile", 1, 1)
    sizes.fill("block_q", choose_block(q_len, most))
    # Blocks that a declared inner one divides.
    inner = math.lcm(LANES, config.block_kv_compute_in or 1)
    sizes.fill("block_kv", choose_block(kv_len, most, math.lcm(inner, config.block_kv_compute or 1)))
    sizes.fill_inner("block_kv_compute", "block_kv", min(_COMPUTE, most), inner)
    sizes.fill_inner("block_kv_compute_in", "block_kv_compute", _COMPUTE_IN.get(problem.device_kind, most))
    sizes.fill("block_q_dkv", sizes["block_q"])
    unit = math.lcm(LANES, config.block_kv_dkv_compute or 1)
    sums = config.block_kv_dkv_sums
    sizes.fill("block_kv_dkv", choose_block(kv_len, most, unit) if sums is None else dividing_block(sums, most, unit))
    sizes.fill_inner("block_kv_dkv_compute", "block_kv_dkv", min(_COMPUTE, most))
    if not fused:
        sizes.fill("block_q_dq", sizes["block_q_dkv"])
        sizes.fill("block_kv_dq", choose_block(kv_len, min(_COMPUTE, most)))
    switches = {
        "use_fused_bwd_kernel": fused,
        "sum_by_product": _sums_by_product(problem, config),
        "stationary_weights": _stationary_weights(problem, config),
    }
    resolved = config.with_fields(sizes.found | switches)
    assert isinstance(resolved, SplashConfig)
    return _with_sums(problem, placement, resolved) if fused and not config.is_set("block_kv_dkv_sums") else resolved


def _with_sums(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> SplashConfig:
    """As few parts of the keys as leave room for their sums in the fused backward; all keys where that doesn't do it."""
    block = config.block_kv_dkv or LANES
    blocks = math.ceil(placement.local.kv_len / block)
    for parts in range(1, min(_PARTS, blocks) + 1):
        sums = None if parts == 1 else math.ceil(blocks / parts) * block
        found = config.with_fields({"block_kv_dkv_sums": sums})
        assert isinstance(found, SplashConfig)
        if counted_vmem(problem, placement, found, backward=True) * ROOM <= vmem_room(problem, config):
            return found
    return config


def _stationary_weights(problem: AttentionProblem, config: SplashConfig) -> bool:
    """What is declared; else where head dims leave columns of the matrix unit idle: 256 on v6e and tpu7x, 128 before.

    Static cycles of the fused backward, at head dim 64: 17 to 21 % fewer. At 128: 12 % fewer on v6e and tpu7x, 5 % more on a
    v5e; at 256 21 % more on tpu7x.
    """
    if config.is_set("stationary_weights"):
        return bool(config.stationary_weights)
    columns = 256 if problem.device_kind in ("TPU v6 lite", "TPU7x") else 128
    return max(problem.head_dim, problem.value_dim) < columns


def _sums_by_product(problem: AttentionProblem, config: SplashConfig) -> bool:
    """What is declared; else on v6e, where the product with the values leaves half of the matrix unit's 256 columns idle.

    14 % fewer static cycles there, at head dim 128; 9 % more on tpu7x, where products are added up elsewhere.
    """
    if config.is_set("sum_by_product"):
        return bool(config.sum_by_product)
    idle = problem.value_dim % 256 == 128
    return idle and problem.device_kind == "TPU v6 lite" and "dropout" not in problem.features
