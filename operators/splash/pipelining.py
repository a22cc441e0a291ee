"""How splash processes tiles if nothing is declared: transposed and pipelined on TPUs where that is faster."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...planning import AttentionProblem, Placement
from ...planning.notes import note
from .splash_config import LANES, SplashConfig

__all__ = [
    "SUBLANES",
    "ComputeBlock",
    "Pipelining",
    "choose_pipelining",
    "layout_note",
    "tile_note",
    "writes_tokens_first",
]

SUBLANES = 16  # per register of bfloat16


class ComputeBlock(NamedTuple):
    """Queries and keys of a compute block, products issued ahead of their use, and a weight's cost, relative to the other
    choices.
    """

    queries: int
    keys: int
    pipeline_depth: int = 0
    cost: float = 1.0


class Pipelining(NamedTuple):
    """Whether the forward pass's tiles are [keys, queries]; the compute blocks it may have; those of the fused backward pass,
    and of the separate one for key and value; and why.

    Of several compute blocks the mask decides: small ones leave out more of it.
    """

    transposed: bool
    compute_blocks: tuple[ComputeBlock, ...]
    compute_blocks_dkv: tuple[ComputeBlock, ...]
    compute_blocks_separate: tuple[ComputeBlock, ...]
    reason: str


# Compute blocks with the fewest static cycles; benchmarks/results/notes.md has the numbers. A cost is what small compute blocks
# take of a tile without a mask, whose edges they follow more closely.
_PIPELINED: dict[str, tuple[ComputeBlock, ...]] = {
    "TPU v6 lite": (ComputeBlock(256, 256, 5),),
    "TPU7x": (ComputeBlock(256, 256, 5),),
}
_PIPELINED_128: dict[str, tuple[ComputeBlock, ...]] = {
    "TPU7x": (ComputeBlock(256, 512, 3), ComputeBlock(256, 256, 6, 1.045))
}
_PIPELINED_DKV: dict[str, tuple[ComputeBlock, ...]] = {
    "TPU v6 lite": (ComputeBlock(256, 256, 3),),
    "TPU7x": (ComputeBlock(512, 256, 2), ComputeBlock(256, 256, 2, 1.05)),
}
_PIPELINED_DKV_128: dict[str, tuple[ComputeBlock, ...]] = {"TPU v6 lite": (ComputeBlock(256, 256, 2),)}
_PIPELINED_DKV_64: dict[str, tuple[ComputeBlock, ...]] = {
    "TPU7x": (ComputeBlock(512, 256, 2), ComputeBlock(256, 256, 3, 1.005))
}
# Without pipelining: half of a block's queries, except on the generations that pipeline, which take all of them.
_LARGE, _WHOLE_BLOCK = ComputeBlock(512, 512), ComputeBlock(4096, 512)
# Small ones only where the mask has many edges; in the backward pass from this head dim on.
_EDGES: tuple[ComputeBlock, ...] = (_LARGE, ComputeBlock(256, 256, 0, 1.1))
_DIM_EDGES_DKV = 128
# On v4 small ones are best in every pass that has compute blocks.
_SMALL: tuple[ComputeBlock, ...] = (ComputeBlock(256, 256),)
_SMALL_ON = "TPU v4"
# From this head dim on products alone fill the cycles of a large compute block of the backward pass; small ones, pipelined, are
# better at a mask's edges.
_DIM_FILLED = 256
_FILLED_DKV: tuple[ComputeBlock, ...] = (_LARGE, ComputeBlock(256, 256, 2, 1.05))
# The largest head dim with a pipelined backward pass.
_DIM_DKV = 256


def choose_pipelining(problem: AttentionProblem, config: SplashConfig) -> Pipelining:
    """As declared, else what suits the generation and the call."""
    reason, dim = _plain(problem), max(problem.head_dim, problem.value_dim)
    transposed = reason is None
    if config.is_set("transposed_tiles"):
        transposed, reason = bool(config.transposed_tiles), "declared"
    return Pipelining(
        transposed,
        _compute_blocks(problem, transposed, dim),
        _compute_blocks_dkv(problem, dim),
        _compute_blocks_separate(problem),
        reason or f"fewer static cycles on {problem.device_kind}",
    )


def _compute_blocks(problem: AttentionProblem, transposed: bool, dim: int) -> tuple[ComputeBlock, ...]:
    """Compute blocks of the forward pass."""
    kind = problem.device_kind
    if not transposed:
        return (_WHOLE_BLOCK,) if kind in _PIPELINED else _SMALL if kind == _SMALL_ON else _EDGES
    return (_PIPELINED_128 if dim == 128 else {}).get(kind) or _PIPELINED.get(kind, (_LARGE,))


def _compute_blocks_dkv(problem: AttentionProblem, dim: int) -> tuple[ComputeBlock, ...]:
    """Compute blocks of the fused backward pass."""
    if problem.device_kind == _SMALL_ON:
        return _SMALL
    if problem.device_kind not in _PIPELINED:
        return _EDGES if dim >= _DIM_EDGES_DKV else (_LARGE,)
    if _plain(problem) is not None or dim > _DIM_DKV:
        return (_LARGE,)
    if dim >= _DIM_FILLED:
        return _FILLED_DKV
    of_dim = {64: _PIPELINED_DKV_64, 128: _PIPELINED_DKV_128}.get(dim, {})
    return of_dim.get(problem.device_kind) or _PIPELINED_DKV[problem.device_kind]


def _compute_blocks_separate(problem: AttentionProblem) -> tuple[ComputeBlock, ...]:
    """Compute blocks of the backward pass for key and value alone."""
    return _SMALL if problem.device_kind == _SMALL_ON else (_LARGE,)


def _plain(problem: AttentionProblem) -> str | None:
    """Why tiles aren't transposed and pipelined; None if they are."""
    if problem.device_kind not in _PIPELINED:
        return f"on {problem.device_kind} they need no fewer cycles"
    if problem.runtime_dtype != "bfloat16":
        return f"products of {problem.runtime_dtype} take more cycles than exponentials"
    if problem.operand("bias") is not None or any(len(leaf.dims) == 4 for leaf in problem.leaves):
        return "bias and mask arrays would have to be transposed"
    return None


def tile_note(problem: AttentionProblem, declared: SplashConfig, config: SplashConfig) -> str | None:
    """A plan's note on how a resolved config's tiles are processed; None on a TPU without a choice."""
    if problem.device_kind not in _PIPELINED:
        return None
    pipelining = choose_pipelining(problem, declared)
    reason = pipelining.reason if pipelining.transposed == config.transposed_tiles else "found by tuning"
    if not config.transposed_tiles:
        return note("splash.tiles", reason=reason)
    return note("splash.transposed_tiles", ahead=config.products_ahead, reason=reason)


def writes_tokens_first(problem: AttentionProblem, config: SplashConfig) -> bool:
    """Whether a call outside a ring writes its output as [batch, tokens, heads * value dim], which layout bthd takes as it is.

    A backward pass would have to turn it again, and heads that don't fill registers can't be written side by side.
    """
    fits = problem.value_dim % LANES == 0 and config.fuse_reciprocal
    return problem.kernel_layout == "bthd" and problem.mode != "__train__" and fits


def layout_note(problem: AttentionProblem, placement: Placement, config: SplashConfig) -> str | None:
    """A note for the plan on what is copied around the kernel to bring tensors into its order; None if nothing is."""
    local, size = placement.local, problem.itemsize_of("output")  # cast before it is turned
    rows = {
        "query": (local.q_len * local.q_heads, problem.head_dim),
        "key": (local.kv_len * local.kv_heads, problem.head_dim),
    }
    if not problem.values_in_key:
        rows["value"] = (rows["key"][0], problem.value_dim)
    rows["output"] = rows["query"][0], problem.value_dim
    layouts = {"query": config.q_layout, "key": config.k_layout, "value": config.v_layout}
    copied = {
        name: local.batch * math.prod(sizes) * (problem.itemsize_of(name) if name in problem.quantised else size)
        for name, sizes in rows.items()
        if problem.layout != "bhtd" or layouts.get(name) == "seq_minor"
    }
    if writes_tokens_first(problem, config) and not placement.sequence.ring_axes:
        del copied["output"]
    if not copied:
        return None
    gradients = " and their gradients" if problem.mode == "__train__" else ""
    remedy = "; layout='bhtd' needs no copy" if all(layout != "seq_minor" for layout in layouts.values()) else ""
    size = sum(copied.values())
    return note("splash.transposed_around", names=list(copied), gradients=gradients, size=size, way=remedy)
