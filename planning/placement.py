"""Placement: the declared specs, fitted to the call, and the specs of the kernel on each device.

The two differ if a device can't work on its declared part alone. A query shard needs every key, so K and V are gathered
along the sequence, or sent around a ring, or heads are split instead of the sequence. K and V heads follow the query heads.
A head is never split along its dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..sharding import AttnShardingRules, FittedRules, FittedSpec, TensorShape, axes_at, fit, fit_tensor, refuse_unfit
from .inside_specs import run_specs, split_specs
from .problem import AttentionProblem
from .repeated import RepeatedAxis, repeated_axes, repeated_lines
from .sequence.split import SequenceSplit, split_sequence

__all__ = ["LocalShape", "Placement", "place_problem"]


class LocalShape(NamedTuple):
    """The sizes that a kernel sees inside the operation, before padding."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int


@dataclass(frozen=True)
class Placement:
    """Where every tensor is: as declared (`fitted`), and inside the operation (`run`, in the kernel's layout).

    `head_axes` and `q_axes` split a device's work. `local` has the sizes that a kernel works on at once; on a zigzag ring
    those are of one chunk. `outer_kv_heads` are the kv heads per device before an all-to-all splits them further. `repeated`:
    the mesh axes over which devices do the same work.
    """

    fitted: FittedRules
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...]
    q_axes: tuple[str, ...]
    local: LocalShape
    kv_repeat: int
    run: tuple[tuple[str, PartitionSpec], ...]
    changes: tuple[str, ...]
    sequence: SequenceSplit
    outer_kv_heads: int
    repeated: tuple[RepeatedAxis, ...] = ()

    def call_spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array of the call before the call starts.

        This is its fitted spec, but heads that will be repeated are not split yet. An array without a spec is unsplit.
        """
        fitted = self.fitted.get(name)
        if fitted is None or len(fitted.shape) != len(shape):
            return PartitionSpec()
        alike = [a == b for a, b in zip(fitted.shape, shape, strict=True)]
        if not all(alike) and (name not in ("key", "value", "key_scale", "value_scale") or self.kv_repeat == 1):
            return PartitionSpec()
        return PartitionSpec(*(entry if same else None for entry, same in zip(fitted.spec, alike, strict=True)))

    def spec(self, operand: str) -> PartitionSpec:
        """The spec of an operand or output inside the operation."""
        return dict(self.run)[operand]

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that split work: batch, queries, heads, or keys if each device attends to a part of them."""
        keys = self.sequence.axes if self.sequence.strategy == "split_kv" else ()
        return (*self.batch_axes, *self.q_axes, *self.head_axes, *keys)


def place_problem(
    problem: AttentionProblem,
    *,
    strict: bool = False,
    kv_heads: str = "replicate",
    strategy: str = "gather",
    ring_order: str | None = None,
) -> Placement:
    """Fit the problem's rules to its shapes and mesh. Errors: ShardingError as required by strict and kv_heads='error'.

    `strict` refuses specs that don't fit as declared, and mesh axes over which work is only repeated.
    """
    counted = {axis for axes in problem.manual_sequence or () for axis in axes}
    fitted = fit(
        problem.rules,
        _shapes(problem),
        tuple(axis._replace(kind="auto") if axis.name in counted else axis for axis in problem.mesh),
        mode=problem.mode,
        layout=problem.layout,
        kv_heads=kv_heads,
        declared=problem.declared_axes,
    )
    fitted = replace(fitted, specs=(*fitted.specs, *_scale_specs(problem, fitted), *_further_specs(problem)))
    query, key = fitted["query"], fitted["key"]
    at = {axis: index for index, axis in enumerate(problem.layout)}
    batch_axes = query.axes(at["b"]) if "b" in at else ()
    outer_heads = query.axes(at["h"])
    sizes = {axis.name: axis.size for axis in problem.mesh}
    split = split_sequence(
        problem,
        strategy,
        ring_order,
        query.axes(at["t"]),
        key.axes(at["t"]),
        axes_at(problem.rules.query, at["t"]),
    )
    whole_queries = split.strategy == "split_kv"
    q_axes = () if whole_queries else tuple(a for a in split.axes if a not in split.head_axes)
    kv_axes = split.axes if whole_queries else ()
    head_axes = (*outer_heads, *split.head_axes)
    of = {name: math.prod(sizes[a] for a in axes) for name, axes in _named(batch_axes, q_axes, head_axes)}
    kv_all = problem.kv_heads * fitted.kv_repeat
    local = LocalShape(
        problem.batch // of["batch"],
        problem.q_len // of["q"] // split.chunks,
        problem.kv_len // (split.shards if whole_queries else split.ring_size) // split.chunks,
        problem.q_heads // of["heads"],
        kv_all // of["heads"],
    )
    run = run_specs(problem, batch_axes, q_axes, head_axes, kv_axes)
    if split.ring_axes or split.head_axes or split.gathers:
        run = (*run, *split_specs(problem, batch_axes, split.axes, outer_heads))
    moved = (*(row.name for row in problem.required if row.moves == "keys"), *problem.scales)
    changes = (
        *_query_changes(query, at, sizes),
        *split.changes(),
        *_key_changes(key, at, sizes, batch_axes, outer_heads, fitted.kv_repeat, ", ".join(moved), split),
        *_bias_changes(problem, fitted, head_axes),
    )
    outer_kv_heads = kv_all // math.prod(sizes[a] for a in outer_heads)
    placement = Placement(
        fitted, batch_axes, head_axes, q_axes, local, fitted.kv_repeat, run, changes, split, outer_kv_heads
    )
    repeated = repeated_axes(problem, fitted, set(placement.axes))
    if strict:
        refuse_unfit(fitted, problem.mode, problem.layout, problem.mesh, repeated_lines(repeated))
    return replace(placement, repeated=repeated)


def _named(*axes: tuple[str, ...]) -> zip[tuple[str, tuple[str, ...]]]:
    return zip(("batch", "q", "heads"), axes, strict=True)


def _shapes(problem: AttentionProblem) -> dict[str, TensorShape]:
    tensors = ("query3d", *(row.name for row in problem.required), "output")
    shapes = {t: TensorShape(problem.shape_of(t), problem.itemsize_of(t)) for t in tensors}
    for operand in problem.operands:
        if operand.name not in AttnShardingRules._fields:
            continue
        shape = operand.shape
        if operand.operand.inside == ("heads",):
            # [kv_heads, sinks] is repeated over the groups, like K and V, before it is split.
            shape = (problem.q_heads, *shape[1:])
        shapes[operand.name] = TensorShape(shape, problem.itemsize_of(operand.name))
    for leaf in problem.leaves:
        size = jnp.dtype(leaf.dtype).itemsize
        if leaf.name == "mask":
            shapes["mask"] = TensorShape(leaf.shape, size)
        elif leaf.name in ("q_segment_ids", "kv_segment_ids"):
            shapes[leaf.name] = TensorShape(leaf.shape[1:] if problem.layout == "thd" else leaf.shape, size)
    return shapes


def _scale_specs(problem: AttentionProblem, fitted: FittedRules) -> tuple[FittedSpec, ...]:
    """A scale is split like its tensor, except along dimensions of 1, which are broadcast."""
    specs = []
    for name, shape in problem.scales.items():
        tensor = fitted["key" if problem.values_in_key else name.removesuffix("_scale")]
        alone = [n == 1 for n in shape]
        spec = PartitionSpec(
            *(None if broadcast else entry for broadcast, entry in zip(alone, tensor.spec, strict=True))
        )
        whole, local = (
            tuple(1 if broadcast else n for broadcast, n in zip(alone, sizes, strict=True))
            for sizes in (tensor.shape, tensor.local_shape)
        )
        size = problem.itemsize_of(name) * math.prod(local)
        specs.append(FittedSpec(name, tensor.dims, spec, whole, local, size, ()))
    return tuple(specs)


def _further_specs(problem: AttentionProblem) -> tuple[FittedSpec, ...]:
    """The fitted specs of operands that the rules don't have: an operation's own."""
    return tuple(
        fit_tensor(
            x.name,
            x.declared,
            TensorShape(x.shape, problem.itemsize_of(x.name)),
            x.operand.dims_in(problem.layout),
            problem.mesh,
        )
        for x in problem.operands
        if x.declared is not None
    )


def _query_changes(query: FittedSpec, at: dict[str, int], sizes: dict[str, int]) -> tuple[str, ...]:
    split = [a for a in query.axes(at["d"]) if sizes[a] > 1]
    if not split:
        return ()
    return (
        f"query: head_dim is declared split over {'+'.join(split)}; gathered, because each head is processed whole",
    )


def _key_changes(
    key: FittedSpec,
    at: dict[str, int],
    sizes: dict[str, int],
    batch_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
    repeat: int,
    names: str,
    split: SequenceSplit,
) -> tuple[str, ...]:
    changes = []
    if key.axes(at["t"]) and split.strategy in ("", "gather"):
        changes.append(
            f"{names}: gathered along kv_len over {'+'.join(key.axes(at['t']))}: each query shard sees every key"
        )
    if key.axes(at["d"]):
        changes.append(f"{names}: gathered along head_dim over {'+'.join(key.axes(at['d']))}")
    if repeat > 1:
        devices = math.prod(sizes[a] for a in head_axes)
        changes.append(f"{names}: each kv head repeated {repeat} times so that {devices} devices get whole heads")
    if key.axes(at["h"]) != head_axes:
        changes.append(
            f"{names}: heads split over {'+'.join(head_axes) or 'nothing'} to follow the query heads, declared "
            f"{'+'.join(key.axes(at['h'])) or 'unsplit'}"
        )
    if "b" in at and key.axes(at["b"]) != batch_axes:
        changes.append(
            f"{names}: batch split over {'+'.join(batch_axes) or 'nothing'} to follow the query, declared "
            f"{'+'.join(key.axes(at['b'])) or 'unsplit'}"
        )
    return tuple(changes)


def _bias_changes(problem: AttentionProblem, fitted: FittedRules, head_axes: tuple[str, ...]) -> tuple[str, ...]:
    """What the bias and the mask's arrays have heads for, split like the query's, where they are declared otherwise."""
    bias = problem.operand("bias")
    shapes = {} if bias is None else {"bias": bias.shape}
    shapes |= {leaf.name: leaf.shape for leaf in problem.leaves if leaf.dims == ("batch", "heads", "q", "kv")}
    changes: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if shape[1] == 1:
            continue
        of_tensor = fitted.get(name)
        declared = () if of_tensor is None else of_tensor.axes(1)
        if declared != head_axes:
            changes.setdefault("+".join(declared) or "unsplit", []).append(name)
    return tuple(
        f"{', '.join(names)}: heads split over {'+'.join(head_axes) or 'nothing'} to follow the query heads, declared {declared}"
        for declared, names in changes.items()
    )
