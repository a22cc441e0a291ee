"""How splash processes tiles if nothing is declared: transposed and pipelined on TPUs where that is faster."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...planning import AttentionProblem, Placement
from ...planning.text import Aside, bytes_text
from .splash_config import SplashConfig

__all__ = ["QUERIES_DKV", "SUBLANES", "TileWay", "layout_note", "tile_note", "way_of_tiles"]

SUBLANES = 16  # per register of bfloat16


class TileWay(NamedTuple):
    """Whether the forward pass's tiles are [keys, queries]; queries per unit (0: the block's) and products issued ahead; the
    same for the fused backward pass, with the keys of its units; and why.
    """

    transposed: bool
    queries: int
    ahead: int
    queries_dkv: int
    keys_dkv: int
    ahead_dkv: int
    reason: str


# By static cycles, for v6e and tpu7x. The scheduler is erratic: from 4 to 6 products ahead cycles differ by 5 %.
_PIPELINED = {"TPU v6 lite": (256, 4, 256, 256, 2), "TPU7x": (256, 5, 512, 256, 2)}
# Units of other tiles: half of a block of 1024 takes 8 % fewer cycles than the whole on v4, v5e and v5p, at any head dim, and 5
# % more on v6e. In backward passes, where products fill the units, between 1 % more and 8 % fewer.
_QUERIES, QUERIES_DKV = 512, 512
# The largest head dim with a pipelined backward pass; more weren't tried.
_DIM_DKV = 256


def way_of_tiles(problem: AttentionProblem, config: SplashConfig) -> TileWay:
    """As declared, else what suits the generation and the call."""
    queries, ahead, queries_dkv, keys_dkv, ahead_dkv = _PIPELINED.get(problem.device_kind, (0, 0, 0, 0, 0))
    reason = _plain(problem)
    if reason is not None or max(problem.head_dim, problem.value_dim) > _DIM_DKV:
        queries_dkv, keys_dkv, ahead_dkv = QUERIES_DKV, 0, 0
    transposed = reason is None
    if config.is_set("transposed_tiles"):
        transposed, reason = bool(config.transposed_tiles), "declared"
    if not transposed:
        queries, ahead = 0 if problem.device_kind in _PIPELINED else _QUERIES, 0
    return TileWay(
        transposed,
        queries,
        ahead,
        queries_dkv,
        keys_dkv,
        ahead_dkv,
        reason or f"fewer static cycles on {problem.device_kind}",
    )


def _plain(problem: AttentionProblem) -> str | None:
    """Why tiles aren't transposed and pipelined; None if they are."""
    if problem.device_kind not in _PIPELINED:
        return f"on {problem.device_kind} they need no fewer cycles"
    if problem.runtime_dtype != "bfloat16":
        return f"products of {problem.runtime_dtype} take more cycles than exponentials"
    if problem.bias_shape is not None or any(len(leaf.dims) == 4 for leaf in problem.leaves):
        return "bias and mask arrays would have to be transposed"
    return None


def tile_note(problem: AttentionProblem, config: SplashConfig) -> str | None:
    """A plan's note on how a resolved config's tiles are processed; None on a TPU without a choice."""
    assert isinstance(problem.config, SplashConfig)
    if problem.device_kind not in _PIPELINED:
        return None
    way = way_of_tiles(problem, problem.config)
    reason = way.reason if way.transposed == config.transposed_tiles else "found by tuning"
    if not config.transposed_tiles:
        return f"forward tiles are [queries, keys], transposed_tiles=False: {reason}"
    return (
        f"forward tiles are [keys, queries], with {config.products_ahead} products ahead of their exponentials, "
        f"transposed_tiles=True: {reason}"
    )


def layout_note(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> str | None:
    """A note for the plan on what is copied around the kernel to bring tensors into its order; None if nothing is."""
    local, size = placement.local, problem.itemsize
    rows = {
        "query": (local.q_len * local.q_heads, problem.head_dim),
        "key": (local.kv_len * local.kv_heads, problem.head_dim),
    }
    rows |= {"value": (rows["key"][0], problem.value_dim), "output": (rows["query"][0], problem.value_dim)}
    turned = {"query": config.q_layout, "key": config.k_layout, "value": config.v_layout}
    copied = {
        name: local.batch * math.prod(sizes) * (problem.itemsize_of(name) if name in problem.quantised else size)
        for name, sizes in rows.items()
        if problem.layout != "bhtd" or turned.get(name) == "seq_minor"
    }
    if not copied:
        return None
    way = "; layout='bhtd' needs no copy" if all(layout != "seq_minor" for layout in turned.values()) else ""
    return Aside(
        f"the kernel works on [batch, heads, tokens, dim]: {', '.join(copied)} and their gradients are transposed around it, "
        f"{bytes_text(sum(copied.values()))} per device forward, unless XLA makes them in that order, as it does behind "
        f"projections{way}"
    )
