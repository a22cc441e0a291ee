"""A sequence split by the caller's own shard_map: with a declared strategy, its axes count as if attnops had split them.

The call's arrays are then parts of the sequence, and the problem describes the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ...errors import InputError
from ...masks import Leaf
from ...planning import AttentionProblem, Placement
from ...sharding import ATTENTION, AttnShardingRules, MeshAxis, axes_at, only
from ..call.arrays import Arrays
from ..call.options import Options

__all__ = ["local_heads", "of_the_whole", "split_by_caller", "whole_leaves", "without_manual"]


def split_by_caller(
    rules: AttnShardingRules, layout: str, axes: Sequence[MeshAxis], strategy: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The Manual axes that split (queries, keys); none for 'gather' and 'auto', where a call's keys are all the keys."""
    if strategy in ("auto", "gather"):
        return (), ()
    manual, at = {a.name for a in axes if a.kind == "manual" and a.size > 1}, layout.index("t")
    query, key = (tuple(a for a in axes_at(spec, at) if a in manual) for spec in (rules.query, rules.key))
    return query, key


def of_the_whole(
    shapes: Arrays, options: Options, layout: str, axes: Sequence[MeshAxis], query: Sequence[str], key: Sequence[str]
) -> Arrays:
    """The shapes of the whole sequence. Errors: InputError for what can't be located from a part: a dense mask or bias."""
    sizes = {a.name: a.size for a in axes}
    times = {"q": math.prod(sizes[a] for a in query), "kv": math.prod(sizes[a] for a in key)}
    over, at = "+".join(dict.fromkeys((*query, *key))), layout.index("t")
    leaves: tuple[Leaf, ...] = () if options.mask is None else options.mask.merge(shapes.mask_leaves).split()[1]
    dense = [leaf.name for leaf in leaves if {"q", "kv"} <= set(leaf.dims) or "q_blocks" in leaf.dims]
    if shapes.bias is not None or dense:
        raise InputError(
            f"the sequence axis {over} is Manual here (this runs inside your own shard_map), so which part "
            f"{', '.join(dense) or 'bias'} covers isn't known; give a mask by its structure (Causal(), SegmentIds, "
            "kv_lengths, ...), or let attnops split the sequence."
        )

    sequence = {"q_len": "q", "kv_len": "kv"}
    whole = {}
    for name, x in shapes.by_name.items():
        dims = ATTENTION[name].dims_in(layout) if name in ATTENTION else ()
        for axis, dim in enumerate(dims):
            # A scale of length 1 counts for all keys.
            if dim in sequence and not (x.shape[axis] == 1 != shapes.key.shape[at] and ATTENTION[name].broadcasts):
                whole[name] = _longer(x, axis, times[sequence[dim]])

    def of_leaf(leaf: Leaf) -> Any:
        x = leaf.array
        for axis, dim in enumerate(leaf.dims):
            x = _longer(x, axis, times[dim]) if dim in times else x
        return x

    return shapes.changed(**whole)._replace(mask_leaves=tuple(of_leaf(leaf) for leaf in leaves))


def whole_leaves(
    leaves: tuple[jax.Array, ...], problem: AttentionProblem, placement: Placement
) -> tuple[jax.Array, ...]:
    """The mask's arrays as the operation requires them: gathered where the caller's split is finer."""
    manual = problem.manual_sequence
    if not manual:
        return leaves
    gathered = []
    for index, (x, leaf) in enumerate(zip(leaves, problem.leaves, strict=True)):
        inside = placement.spec(f"leaf{index}")
        for axis, dim in enumerate(leaf.dims):
            if dim in ("q", "kv"):
                gone = tuple(a for a in manual[dim == "kv"] if a not in axes_at(inside, axis))
                x = lax.all_gather(x, gone, axis=axis, tiled=True) if gone else x
        gathered.append(x)
    return tuple(gathered)


def local_heads(x: jax.Array, problem: AttentionProblem, placement: Placement) -> jax.Array:
    """This device's part of an array with one element per head, after an exchange over the caller's axes."""
    manual = {a for axes in problem.manual_sequence or () for a in axes}
    axes = tuple(a for a in placement.sequence.head_axes if a in manual)
    if not axes:
        return x
    count = x.shape[0] // math.prod(a.size for a in problem.mesh if a.name in axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * count, count)


def without_manual(specs: Any, problem: AttentionProblem) -> Any:
    """Specs for the inner shard_map, which doesn't know the caller's axes."""
    ours = {a.name for a in problem.mesh if a.kind != "manual"}
    return jax.tree.map(lambda spec: only(spec, ours), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _longer(x: Any, axis: int, times: int) -> Any:
    return jax.ShapeDtypeStruct((*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :]), x.dtype)
