"""The operands of a placed call: how each is split as declared, and how inside the operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..sharding import axes_at
from .placement import Placement
from .problem import AttentionProblem

__all__ = ["PlacedTensor", "all_axes", "axes_by_dim", "placed_tensors", "sent_itemsize"]


@dataclass(frozen=True)
class PlacedTensor:
    """An operand inside the operation: its full shape, bytes per element, and the axes of each dimension."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    declared: tuple[tuple[str, ...], ...]
    inside: tuple[tuple[str, ...], ...]
    gradient: bool


def sent_itemsize(dtype: str, cpu: bool) -> int:
    """Bytes per element when sent: XLA:CPU computes 16-bit floats as float32, and sends them so."""
    size = jnp.dtype(dtype).itemsize
    return max(size, 4) if cpu and size == 2 else size


def placed_tensors(problem: AttentionProblem, placement: Placement, item: int) -> Iterator[PlacedTensor]:
    """All operands, in their shapes inside the operation: four dimensions, repeated heads."""
    for name in ("query", "key", "value"):
        fitted = placement.fitted[name]
        declared = placement.given(name, problem.shape_of(name))
        shape = fitted.shape if len(fitted.shape) == 4 else (1, *fitted.shape)
        narrow = name in problem.quantised
        size = problem.itemsize_of(name) if narrow else item
        yield PlacedTensor(
            name,
            shape,
            size,
            axes_by_dim(declared, 4),
            axes_by_dim(placement.spec(name), 4),
            not (narrow and problem.quantised[name] == "int8"),
        )
    for name in problem.scales:
        axes = axes_by_dim(placement.spec(name), 3)
        kv = placement.fitted["key"].shape[problem.layout.index("h")]
        yield PlacedTensor(name, (problem.batch, kv, problem.kv_len), 4, axes, axes, True)
    if problem.bias_shape is not None:
        declared = placement.given("bias", problem.bias_shape)
        yield PlacedTensor(
            "bias",
            problem.bias_shape,
            item,
            axes_by_dim(declared, 4),
            axes_by_dim(placement.spec("bias"), 4),
            True,
        )
    if problem.sinks_shape is not None:
        declared = placement.given("softmax_aux", problem.sinks_shape)
        inside = axes_by_dim(placement.spec("softmax_aux"), 1)
        yield PlacedTensor("softmax_aux", (problem.q_heads,), 4, axes_by_dim(declared, 1)[:1], inside, True)
    for index, leaf in enumerate(problem.leaves):
        of_leaf = placement.fitted.get(leaf.name)
        spec = PartitionSpec() if of_leaf is None else of_leaf.spec
        rank = len(leaf.shape)
        yield PlacedTensor(
            f"mask {index}",
            leaf.shape,
            jnp.dtype(leaf.dtype).itemsize,
            axes_by_dim(spec, rank),
            axes_by_dim(placement.spec(f"leaf{index}"), rank),
            False,
        )


def axes_by_dim(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension; a packed tensor has no batch, so its first dimension has none."""
    entries = tuple(axes_at(spec, index) for index in range(len(spec)))
    if len(entries) == rank - 1:
        return ((), *entries)
    return (*entries, *((),) * (rank - len(entries)))


def all_axes(entries: tuple[tuple[str, ...], ...]) -> set[str]:
    return {axis for entry in entries for axis in entry}
