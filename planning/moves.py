"""What a placed call sends in its forward pass, as data: a picture draws these moves, and traffic.py counts their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from .placed_tensors import PlacedTensor, all_axes, placed_tensors
from .placement import Placement
from .problem import AttentionProblem

__all__ = ["MASK_ROWS", "Move", "gathers", "strategy_moves"]

MASK_ROWS = "the mask's rows"
_WHOLE = {
    "head_dim": "each head is processed whole",
    "value_dim": "each head is processed whole",
    "q_len": "every query attends to each part of the keys",
    "kv_len": "a query sees every key",
    "kv": "a query sees every key",
}


class Move(NamedTuple):
    """Tensors that are sent alike: operands, 'output', 'lse' or the rows of the mask's arrays; along which mesh axes, and why.

    kind: 'all-gather', 'all-to-all', 'all-reduce', or the permutes of a ring: 'ring' around it, 'permute' for zigzag order.
    """

    kind: str
    tensors: tuple[str, ...]
    axes: tuple[str, ...]
    reason: str


def gathers(problem: AttentionProblem, placement: Placement) -> Iterator[Move]:
    """The operands that are split as declared along axes along which they aren't split inside the operation."""
    for (axes, reason), tensors in groupby(_gathered(problem, placement), lambda one: one[1:]):
        yield Move("all-gather", tuple(dict.fromkeys(name for name, *_ in tensors)), axes, reason)


def _gathered(problem: AttentionProblem, placement: Placement) -> Iterator[tuple[str, tuple[str, ...], str]]:
    for tensor in placed_tensors(problem, placement):
        gone = all_axes(tensor.declared) - all_axes(tensor.inside)
        for dim, axes in zip(tensor.dims, tensor.declared, strict=True):
            if along := tuple(axis for axis in axes if axis in gone):
                yield tensor.name, along, _WHOLE.get(dim, f"used whole along {dim}")


def strategy_moves(
    problem: AttentionProblem, placement: Placement, tensors: tuple[PlacedTensor, ...]
) -> Iterator[Move]:
    """What the strategy for a split sequence sends, in this order. tensors: the call's placed tensors."""
    split = placement.sequence
    keys = tuple(tensor.name for tensor in tensors if tensor.moves == "keys")
    if split.gathers:
        yield Move("all-gather", keys, split.axes, "a query sees every key")
    if split.head_axes:
        reason = "heads are split instead of the sequence"
        yield Move("all-to-all", ("query", *keys), split.head_axes, reason)
    if split.zigzag:
        yield Move("permute", ("query", *keys), split.ring_axes, "into zigzag order")
        if any("q" in leaf.dims and leaf.shape[leaf.dims.index("q")] > 1 for leaf in problem.leaves):
            yield Move("permute", (MASK_ROWS,), split.ring_axes, "into zigzag order")
    if split.ring_axes:
        steps = f"in {len(split.steps) - 1} of {split.ring_size - 1} steps"
        yield Move("ring", keys, split.ring_axes, steps)
    if split.zigzag:
        yield Move("permute", ("output",), split.ring_axes, "back into order")
    if split.strategy == "split_kv":
        yield Move("all-reduce", ("output", "lse"), split.axes, "outputs over parts of the keys are merged")
    if split.head_axes:
        yield Move("all-to-all", ("output",), split.head_axes, "the sequence is split again")
