"""Counts the VMEM that splash's kernels take with a resolved config, and what they may take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...devices import vmem_of
from ...errors import ConfigError
from ...planning import AttentionProblem, Placement
from ...planning.notes import note
from .kernel.splash_blocks import SplashBlocks
from .passes import blocks_of
from .splash_config import LANES, SplashConfig

if TYPE_CHECKING:
    from ...scores import Score
    from .kernel.vmem import ScoreShape, Shape

__all__ = ["ROOM", "counted_vmem", "fits", "too_much_vmem", "vmem_need", "vmem_parts", "vmem_room"]

# What is counted is at most so much less than what the compiler takes (tools/vmem_counts.py).
ROOM = 1.25
_MIB = 1 << 20


def vmem_need(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> int:
    """Bytes of VMEM with which a resolved config's larger pass compiles: the most that is counted, with some margin."""
    parts = vmem_parts(problem, placement, config, at_most=True)
    return math.ceil(max(sum(part.values()) for part in parts.values()) * ROOM)


def vmem_parts(
    problem: AttentionProblem, placement: Placement, config: SplashConfig, *, at_most: bool = False
) -> dict[str, dict[str, int]]:
    """Each kernel of a resolved config -> bytes of VMEM by what they hold, as counted. at_most: to choose blocks by."""
    from .kernel.vmem import backward_parts, forward_parts

    shape, blocks = _shape(problem, placement, config), blocks_of(config, SplashBlocks)
    return {
        "forward": forward_parts(shape, blocks, at_most=at_most),
        **backward_parts(shape, blocks, at_most=at_most),
    }


def fits(problem: AttentionProblem, placement: Placement, config: SplashConfig, backward: bool) -> bool:
    """Whether one pass of a resolved config may fit: its blocks and sums take no more than the most there is."""
    return counted_vmem(problem, placement, config, backward) <= vmem_room(problem, config)


def counted_vmem(problem: AttentionProblem, placement: Placement, config: SplashConfig, backward: bool) -> int:
    """The most that is counted for the forward kernel, or for the larger backward kernel, in bytes."""
    parts = vmem_parts(problem, placement, config, at_most=True)
    return max(sum(part.values()) for name, part in parts.items() if (name != "forward") == backward)


def too_much_vmem(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> str | None:
    """A note for the plan if a resolved config is counted to need more VMEM than there is."""
    counted = max(sum(part.values()) for part in vmem_parts(problem, placement, config).values())
    room = vmem_room(problem, config)
    if counted * ROOM <= room:
        return None
    return note("splash.vmem", counted=counted / _MIB, room=room / _MIB)


def vmem_room(problem: AttentionProblem, config: SplashConfig) -> int:
    """The VMEM that the kernels may take: as declared, up to the device's; all of the device's if nothing is declared."""
    vmem = vmem_of(problem.device_kind)
    if config.vmem_limit_bytes is None:
        return vmem.default if config.is_set("vmem_limit_bytes") else vmem.maximum
    return min(config.vmem_limit_bytes, vmem.maximum)


def _shape(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> Shape:
    from .kernel.grid import Heads
    from .kernel.vmem import Shape

    local = placement.local
    group, tile = local.q_heads // local.kv_heads, config.heads_per_tile or 1
    if not _divides(tile, group, local.kv_heads):
        choices = [n for n in range(1, local.q_heads + 1) if _divides(n, group, local.kv_heads)]
        raise ConfigError(
            f"SplashConfig: heads_per_tile={tile} doesn't divide the {local.q_heads} query heads ({local.kv_heads} kv heads) "
            f"of a device into whole groups or parts of one; wanted one of {', '.join(map(str, choices))}."
        )
    bias = problem.operand("bias")
    dense = (
        0 if bias is None else 2 if bias.dtype == "bfloat16" else 4
    )  # of another dtype the kernel gets a bias in float32
    dense += sum("kv" in leaf.dims[2:] for leaf in problem.leaves)
    itemsize = 4 if problem.runtime_dtype == "float32" else 2
    key, value = (
        (1 if name in problem.quantised else itemsize, f"{name}_scale" in problem.scales) for name in ("key", "value")
    )
    return Shape(
        local.q_len,
        local.kv_len,
        Heads.tiled(local.kv_heads, group, tile),
        problem.head_dim,
        problem.value_dim,
        itemsize,
        dense,
        key,
        value,
        problem.device_kind,
        problem.value_columns is not None,
        None if problem.score is None else _score_shape(problem, problem.score, local.q_len + local.kv_len),
    )


def _score_shape(problem: AttentionProblem, score: Score, lengths: int) -> ScoreShape:
    from .kernel.vmem import ScoreShape

    steps = score.step_names(problem.contiguous_positions)
    of_query = of_key = 0
    for capture, shape in ((x.operand, x.shape) for x in problem.operands if x.operand.feature == "score"):
        sizes = dict(zip(capture.dims, shape, strict=False))
        width = math.prod(n for dim, n in sizes.items() if dim not in ("batch", "heads", "q_len"))
        of_query += ("q_len" in sizes) * (8 if width == 1 else math.ceil(width / LANES) * LANES) * 4
        of_key += bool({"kv_len", "all_keys"} & set(sizes)) * 8 * 4
    whole = ("diagonal" in steps) * 8 * 4 * lengths
    return ScoreShape(len(steps & {"linear", "diagonal"}), of_query + ("add" in steps) * 8 * 4, of_key, whole)


def _divides(tile: int, group: int, kv_heads: int) -> bool:
    return group % tile == 0 if tile <= group else tile % group == 0 and kv_heads % (tile // group) == 0
