"""The sizes that a search for the GPU kernels tries: around the default choice, the nearest first."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ..choices.shipped import ShippedTable
from .flash_config import FlashAttention2Config
from .flash_sizes import resolve_flash
from .pass_fields import FIELDS

__all__ = ["FLASH_SHIPPED", "flash_candidates", "flash_tuned_fields"]

_FORWARD = (*FIELDS["forward"], "kv_splits")
_BACKWARD = FIELDS["dkv"], FIELDS["dq"]
# Not `kv_splits`: it depends on the number of rows and heads, which a row of the table is for any of.
FLASH_SHIPPED = ShippedTable(Path(__file__).with_name("shipped.json"), FIELDS["forward"])
# A size's neighbours: half, the same, twice. Stages: one fewer, the same, one more.
_FACTORS = (0.5, 1, 2)
_MIN = {"block_q": 16, "block_kv": 16, "num_warps": 1, "num_stages": 1, "kv_splits": 1}
_MAX = {"block_q": 256, "block_kv": 256, "num_warps": 16, "num_stages": 4, "kv_splits": 256}


def flash_tuned_fields(
    problem: AttentionProblem, placement: Placement, config: FlashAttention2Config
) -> tuple[str, ...]:
    """The undeclared sizes; none where queries or keys are split, because each device then has different tiles."""
    if placement.q_axes or placement.sequence.strategy == "split_kv":
        return ()
    names = (*_FORWARD, *itertools.chain(*_BACKWARD)) if problem.mode == "__train__" else _FORWARD
    return tuple(name for name in names if getattr(config, name) is None)


def flash_candidates(
    problem: AttentionProblem, placement: Placement, config: FlashAttention2Config
) -> dict[str, tuple[dict[str, Any], ...]]:
    """'forward', and in mode train 'backward' -> undeclared sizes with values; the default choice comes first."""
    free, chosen = flash_tuned_fields(problem, placement, config), resolve_flash(problem, placement, config)
    parts: dict[str, list[tuple[str, ...]]] = {"forward": [_FORWARD], "backward": [*_BACKWARD]}
    candidates: dict[str, tuple[dict[str, Any], ...]] = {}
    for part, groups in parts.items():
        names = [name for group in groups for name in group if name in free]
        if not names:
            continue
        chosen_sizes = {name: getattr(chosen, name) for name in names}
        around: list[list[dict[str, Any]]] = []
        for group in groups:  # the sizes of the backward kernels are independent
            fields = [name for name in group if name in free]
            near = [_near(name, chosen_sizes[name]) for name in fields]
            pairs = sorted(
                itertools.product(*near),
                key=lambda option, o=chosen_sizes, f=fields: _far(option, [o[n] for n in f]),  # type: ignore[misc]
            )
            around.append([chosen_sizes | dict(zip(fields, option, strict=True)) for option in pairs])
        options = [option for row in itertools.zip_longest(*around) for option in row if option is not None]
        candidates[part] = tuple(_distinct(problem, placement, config, [chosen_sizes, *options]))
    return candidates


def _near(name: str, size: int) -> list[int]:
    base = name.removesuffix("_dkv").removesuffix("_dq")
    around = [size - 1, size, size + 1] if base == "num_stages" else [int(size * factor) for factor in _FACTORS]
    return [n for n in around if _MIN[base] <= n <= max(size, _MAX[base])]


def _far(sizes: tuple[int, ...], chosen: list[int]) -> float:
    return sum(abs(math.log2(n / size)) for n, size in zip(sizes, chosen, strict=True))


def _distinct(
    problem: AttentionProblem, placement: Placement, config: FlashAttention2Config, options: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Those that work together, each once."""
    distinct: dict[tuple[Any, ...], dict[str, Any]] = {}
    for option in options:
        try:
            resolve_flash(problem, placement, config.with_fields(option))
        except ConfigError:
            continue
        distinct.setdefault(tuple(option.items()), option)
    return list(distinct.values())
