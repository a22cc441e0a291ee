"""The arrays of a planned call: dtype, placement and bytes per device of each, those of the mask and the results among them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import PartitionSpec

from ..sharding import axes_at
from ..symbolic import surely
from .placed_tensors import placed_tensors
from .plan_fields import PlanFields

__all__ = ["CallArray", "call_arrays", "large_arrays"]

_SHARE = 20  # an array is large from this part of the bytes of all arrays


class CallArray(NamedTuple):
    """An array as given or returned: its spec and shape, and its shape and bytes per device. inside: the spec and the bytes per
    device inside the operation; None for results.
    """

    name: str
    dtype: str
    spec: PartitionSpec
    shape: tuple[int, ...]
    device_shape: tuple[int, ...]
    device_bytes: int
    inside: tuple[PartitionSpec, int] | None = None


def call_arrays(plan: PlanFields) -> tuple[CallArray, ...]:
    """Operands first, in the order of a call's arguments, then the mask's arrays, then results."""
    return (*_operands(plan), *_results(plan))


def large_arrays(plan: PlanFields) -> tuple[CallArray, ...]:
    """Those with more than 5 % of the bytes that a device holds of all, or that may have: sizes may be symbolic."""
    arrays = call_arrays(plan)
    total = sum(array.device_bytes for array in arrays)

    def is_small(array: CallArray) -> bool:
        return surely(lambda: _SHARE * array.device_bytes <= total)

    return tuple(array for array in arrays if not is_small(array))


def _operands(plan: PlanFields) -> Iterator[CallArray]:
    problem, placement = plan.problem, plan.placement
    sizes = {axis.name: axis.size for axis in problem.mesh}
    names = {leaf.name: f"leaf{index}" for index, leaf in enumerate(problem.leaves)}
    for tensor in placed_tensors(problem, placement):
        inside = placement.spec(names.get(tensor.name, tensor.name)), tensor.inside_bytes(sizes)
        fitted = placement.fitted.get(tensor.name)
        if fitted is None:
            outside = tensor.call_spec, tensor.call_shape, tensor.call_shape, tensor.call_bytes(sizes)
        else:
            outside = fitted.spec, fitted.shape, fitted.local_shape, fitted.local_bytes
        yield CallArray(tensor.name, tensor.dtype, *outside, inside)


def _results(plan: PlanFields) -> Iterator[CallArray]:
    problem, placement = plan.problem, plan.placement
    output = placement.fitted["output"]
    sizes = {axis.name: axis.size for axis in problem.mesh}
    yield CallArray(
        "output", problem.dtype_of("output"), output.spec, output.shape, output.local_shape, output.local_bytes
    )
    rows = problem.batch, problem.q_heads, problem.q_len
    for name, feature, shape in (
        ("weights", "return_weights", (*rows, problem.kv_len)),
        ("lse", "return_lse", rows),
    ):
        if feature in problem.features:
            spec = placement.spec(name)
            parts = [math.prod(sizes[axis] for axis in axes_at(spec, index)) for index in range(len(shape))]
            local = tuple(size // count for size, count in zip(shape, parts, strict=True))
            bytes_ = math.prod(local) * problem.itemsize_of(name)
            yield CallArray(name, problem.dtype_of(name), spec, shape, local, bytes_)
