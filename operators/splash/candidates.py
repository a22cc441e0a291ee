"""The block sizes that a search tries: those that the mask, the lengths and the VMEM allow, the most promising first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...planning import AttentionProblem, OperationConfig, Placement
from ..choices.shipped import ShippedTable
from . import pass_fields
from .block_choice import packed_heads, resolve_attnops
from .pass_cost import tile_cost
from .splash_config import LANES, SplashConfig
from .vmem_count import fits

__all__ = ["BACKWARD", "FORWARD", "SHIPPED", "candidates", "tuned_fields"]

FORWARD = pass_fields.FORWARD.sizes
BACKWARD = ("use_fused_bwd_kernel", *pass_fields.FUSED.sizes, *pass_fields.DQ.sizes, "stationary_weights")
SHIPPED = ShippedTable(Path(__file__).with_name("shipped.json"), FORWARD)
_BLOCKS, _COMPUTE = (2048, 1024, 512, 256, 128), (512, 1024, 256)
_UNIT = 512  # of queries and of keys, as most are


def tuned_fields(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> tuple[str, ...]:
    """The undeclared fields that a search chooses; none if queries or keys are split over devices.

    Each device then has its own tiles, and one device's call doesn't represent the problem.
    """
    if placement.q_axes or placement.sequence.strategy == "split_kv":
        return ()
    return tuple(name for name in (*FORWARD, *BACKWARD) if not config.is_set(name))


def candidates(
    problem: AttentionProblem, placement: Placement, config: SplashConfig
) -> dict[str, tuple[dict[str, Any], ...]]:
    """'forward', and in mode train 'backward' -> undeclared fields with values; the heuristic's own come first."""
    chosen = resolve_attnops(problem, placement, config)
    by_part = {"forward": _distinct(problem, placement, config, chosen, FORWARD, _forward(problem, placement, config))}
    if problem.mode == "__train__":
        by_part["backward"] = _distinct(
            problem, placement, config, chosen, BACKWARD, _backward(problem, placement, config)
        )
    return {part: options for part, options in by_part.items() if options and options[0]}


def _distinct(
    problem: AttentionProblem,
    placement: Placement,
    config: SplashConfig,
    chosen: OperationConfig,
    names: tuple[str, ...],
    options: list[dict[str, Any]],
) -> tuple[dict[str, Any], ...]:
    """The heuristic's choice, then those that resolve to something else and may fit."""
    free = tuple(name for name in names if not config.is_set(name))
    distinct = {_values(chosen, free): None}
    for option in options:
        requested = {name: value for name, value in option.items() if name in free}
        try:
            resolved = resolve_attnops(problem, placement, config.with_fields(requested))
        except ConfigError:
            continue
        if fits(problem, placement, resolved, names is BACKWARD):
            distinct.setdefault(_values(resolved, free))
    return tuple(
        {name: value for name, value in zip(free, values, strict=True) if value is not None} for values in distinct
    )


def _values(config: OperationConfig, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in names)


def _pairs(problem: AttentionProblem, placement: Placement, config: SplashConfig, suffix: str) -> list[tuple[int, int]]:
    """(block_q, block_kv), cheapest first; a block is at most a length's own padding."""
    sizes = []
    for axis, length in (("q", placement.local.q_len), ("kv", placement.local.kv_len)):
        declared = getattr(config, f"block_{axis}{suffix}")
        max_block = math.ceil(length / LANES) * LANES
        sizes.append([declared] if declared else [n for n in _BLOCKS if n <= max_block] or [max_block])
    pairs: list[tuple[int, int]] = list(itertools.product(*sizes))
    return sorted(
        pairs, key=lambda pair: tile_cost(problem, placement, pair, (min(pair[0], _UNIT), min(pair[1], _UNIT)))
    )


def _forward(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> list[dict[str, Any]]:
    sums = (None, True) if problem.value_dim % LANES == 0 and "dropout" not in problem.features else (None,)
    first = resolve_attnops(problem, placement, config)

    def inside(block_kv: int) -> Iterator[dict[str, Any]]:
        yield {}  # the compute blocks that the heuristic takes in these blocks
        for by_product, inner, compute in itertools.product(sums, (1, 2), _COMPUTE):
            if block_kv % compute == 0 and (compute // inner) % LANES == 0:
                option = {"block_kv_compute": compute, "block_kv_compute_in": compute // inner}
                yield option if by_product is None else option | {"sum_by_product": by_product}
        if first.transposed_tiles:
            yield {"transposed_tiles": False}
            for ahead in (2, 3, 6):
                yield {"products_ahead": ahead}
        for heads in packed_heads(problem, placement, first.block_q or 0)[:-1]:
            yield {"heads_per_tile": heads}

    pairs = _pairs(problem, placement, config, "")
    return _diagonal([[{"block_q": q, "block_kv": kv} | option for option in inside(kv)] for q, kv in pairs])


def _backward(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> list[dict[str, Any]]:
    first = resolve_attnops(problem, placement, config)
    chosen = bool(first.stationary_weights)

    def inside(block_q: int, block_kv: int) -> Iterator[dict[str, Any]]:
        yield {"use_fused_bwd_kernel": True}
        for compute in (n for n in _COMPUTE if block_kv % n == 0):
            yield {"block_kv_dkv_compute": compute, "use_fused_bwd_kernel": True}
        yield {"stationary_weights": not chosen, "use_fused_bwd_kernel": True}
        for compute in (n for n in _COMPUTE if block_kv % n == 0):
            keys = min(block_kv, compute)
            separate = {"block_q_dq": block_q, "block_kv_dq": keys, "block_kv_dq_compute": keys}
            yield {"block_kv_dkv_compute": compute, "use_fused_bwd_kernel": False} | separate

    pairs = _pairs(problem, placement, config, "_dkv")
    return _diagonal([[{"block_q_dkv": q, "block_kv_dkv": kv} | option for option in inside(q, kv)] for q, kv in pairs])


def _diagonal(rows: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Promising rows, and promising entries of each row, first: sorted by the sum of both places."""
    placed = [(i + j, i, option) for i, row in enumerate(rows) for j, option in enumerate(row)]
    return [option for _, _, option in sorted(placed, key=lambda entry: entry[:2])]
