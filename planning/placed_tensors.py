"""The operands of a placed call: how each is split as declared, and how inside the operation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..sharding import axes_at
from .placement import Placement
from .problem import AttentionProblem

__all__ = ["PlacedTensor", "all_axes", "axes_by_dim", "placed_tensors", "sent_itemsize"]


@dataclass(frozen=True)
class PlacedTensor:
    """An operand of the call: as given (dtype, shape, spec), and inside the operation (dtype, shape, axes by dimension).

    Inside, key and value have four dimensions and repeated heads, sinks are one per head, and scales are float32 for each token.
    itemsize: bytes per element when sent. declared: the axes by dimension as given, for the shape inside. moves: as in Operand.
    dims: the names of the dimensions inside.
    """

    name: str
    dtype: str
    call_shape: tuple[int, ...]
    call_spec: PartitionSpec
    inside_dtype: str
    shape: tuple[int, ...]
    itemsize: int
    declared: tuple[tuple[str, ...], ...]
    inside: tuple[tuple[str, ...], ...]
    gradient: bool
    moves: str
    dims: tuple[str, ...]

    def call_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes on each device as given; `sizes`: those of the mesh axes."""
        axes = axes_by_dim(self.call_spec, len(self.call_shape))
        return _bytes(self.call_shape, jnp.dtype(self.dtype).itemsize, axes, sizes)

    def inside_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes on each device inside the operation."""
        return _bytes(self.shape, jnp.dtype(self.inside_dtype).itemsize, self.inside, sizes)


def sent_itemsize(dtype: str, cpu: bool) -> int:
    """Bytes per element when sent: XLA:CPU computes 16-bit floats as float32, and sends them so."""
    size = jnp.dtype(dtype).itemsize
    return max(size, 4) if cpu and size == 2 else size


def placed_tensors(problem: AttentionProblem, placement: Placement) -> Iterator[PlacedTensor]:
    """All operands of a call, in the order of its arguments, then the arrays of its mask."""
    cpu = problem.platform == "cpu"
    kv_heads = placement.fitted["key"].shape[problem.layout.index("h")]
    sizes = problem.sizes | {"kv_heads": kv_heads}
    for row in (*problem.required, *(operand.operand for operand in problem.operands)):
        operand, dtype = problem.operand(row.name), problem.dtype_inside(row)
        if operand is None:
            outer_shape, shape = problem.shape_of(row.name), row.shape(sizes, problem.kernel_layout)
        else:
            outer_shape, shape = operand.shape, operand.shape_inside(problem.kernel_layout, sizes)
        spec, axes = placement.call_spec(row.name, outer_shape), axes_by_dim(placement.spec(row.name), len(shape))
        declared = axes if row.name in problem.scales else axes_by_dim(spec, len(shape))[: len(shape)]
        yield PlacedTensor(
            row.name,
            problem.dtype_of(row.name),
            outer_shape,
            spec,
            dtype,
            shape,
            sent_itemsize(dtype, cpu),
            declared,
            axes,
            row.gradient and dtype != "int8",
            row.moves,
            row.dims_inside(problem.kernel_layout),
        )
    for index, leaf in enumerate(problem.leaves):
        fitted = placement.fitted.get(leaf.name)
        spec = PartitionSpec() if fitted is None else fitted.spec
        declared, inside = (axes_by_dim(x, len(leaf.shape)) for x in (spec, placement.spec(f"leaf{index}")))
        size = jnp.dtype(leaf.dtype).itemsize
        yield PlacedTensor(
            leaf.name,
            leaf.dtype,
            leaf.shape,
            spec,
            leaf.dtype,
            leaf.shape,
            size,
            declared,
            inside,
            False,
            "",
            leaf.dims,
        )


def _bytes(shape: tuple[int, ...], itemsize: int, axes: tuple[tuple[str, ...], ...], sizes: Mapping[str, int]) -> int:
    return math.prod(shape) * itemsize // math.prod(sizes[axis] for axis in all_axes(axes))


def axes_by_dim(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension; a packed tensor has no batch, so its first dimension has none."""
    entries = tuple(axes_at(spec, index) for index in range(len(spec)))
    if len(entries) == rank - 1:
        return ((), *entries)
    return (*entries, *((),) * (rank - len(entries)))


def all_axes(entries: tuple[tuple[str, ...], ...]) -> set[str]:
    return {axis for entry in entries for axis in entry}
