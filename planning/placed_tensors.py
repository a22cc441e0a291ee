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
    itemsize: bytes per element when sent. declared: the axes by dimension as given, for the shape inside.
    """

    name: str
    dtype: str
    given_shape: tuple[int, ...]
    given_spec: PartitionSpec
    inside_dtype: str
    shape: tuple[int, ...]
    itemsize: int
    declared: tuple[tuple[str, ...], ...]
    inside: tuple[tuple[str, ...], ...]
    gradient: bool

    def given_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes on each device as given; `sizes`: those of the mesh axes."""
        axes = axes_by_dim(self.given_spec, len(self.given_shape))
        return _bytes(self.given_shape, jnp.dtype(self.dtype).itemsize, axes, sizes)

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

    def placed(
        name: str,
        given: tuple[int, ...],
        shape: tuple[int, ...],
        inside: PartitionSpec,
        dtype: str,
        gradient: bool = True,
    ) -> PlacedTensor:
        """dtype: that inside the operation."""
        spec, axes = placement.given(name, given), axes_by_dim(inside, len(shape))
        declared = axes if name in problem.scales else axes_by_dim(spec, len(shape))[: len(shape)]
        size = sent_itemsize(dtype, cpu)
        return PlacedTensor(name, problem.dtype_of(name), given, spec, dtype, shape, size, declared, axes, gradient)

    for name in ("query", "key", "value"):
        shape = placement.fitted[name].shape
        shape = shape if len(shape) == 4 else (1, *shape)
        dtype = problem.quantised.get(name, problem.runtime_dtype)
        yield placed(name, problem.shape_of(name), shape, placement.spec(name), dtype, dtype != "int8")
    for name, given in problem.scales.items():
        heads = placement.fitted["key"].shape[problem.layout.index("h")]
        yield placed(name, given, (problem.batch, heads, problem.kv_len), placement.spec(name), "float32")
    if problem.bias_shape is not None:
        yield placed("bias", problem.bias_shape, problem.bias_shape, placement.spec("bias"), problem.dtype_of("bias"))
    if problem.sinks_shape is not None:
        inside = placement.spec("softmax_aux")
        yield placed("softmax_aux", problem.sinks_shape, (problem.q_heads,), inside, problem.softmax_dtype)
    for index, leaf in enumerate(problem.leaves):
        fitted = placement.fitted.get(leaf.name)
        spec = PartitionSpec() if fitted is None else fitted.spec
        axes = [axes_by_dim(x, len(leaf.shape)) for x in (spec, placement.spec(f"leaf{index}"))]
        size = jnp.dtype(leaf.dtype).itemsize
        yield PlacedTensor(
            leaf.name, leaf.dtype, leaf.shape, spec, leaf.dtype, leaf.shape, size, axes[0], axes[1], False
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
