"""A LocalCall with any kernel that can work on parts of the keys: those of this device, or those that come around a ring."""

from __future__ import annotations

from dataclasses import replace

import jax

from ...masks import Mask
from ...scores.steps import Add, Steps
from ..call.local import LocalCall, Ring
from ..kernels.lse import combine_by_lse
from ..kernels.operands import Operands
from ..kernels.partial_attention import PartialAttention, differentiable
from .ring import ring_attention
from .zigzag import contiguous, zigzag

__all__ = ["attend_call"]


def attend_call(
    call: LocalCall, kernel: PartialAttention, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(output, lse) of this device's queries and the call's keys; tensors in the kernel's layout, the output as well. The kernel
    gets no values where they are a part of the keys, as its `value_columns` says."""
    values = None if call.problem.value_columns is not None else value
    if call.ring is not None:
        return _attend_ring(call.ring, call, kernel, query, key, values)
    operands = Operands(query, key, values, call.bias, call.sinks, call.key_scale, call.value_scale, call.captures)
    return differentiable(kernel, operands, call.mask, call.dropout, call.score)


def _attend_ring(
    ring: Ring, call: LocalCall, kernel: PartialAttention, query: jax.Array, key: jax.Array, value: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Of the keys of all devices."""
    call, mask = _with_bias_in_score(call), call.mask
    rows = kernel.layout.index("t")
    if ring.zigzag:
        query, key, value = jax.tree.map(lambda x: zigzag(x, ring, rows), (query, key, value))
        mask = replace(mask, mask=_rows_in_zigzag(mask.mask, ring))
    operands = Operands(query, key, value, None, None, captures=_captures_in_zigzag(call, ring))
    output, lse = ring_attention(kernel, ring, operands, mask, call.dropout, call.score)
    if ring.zigzag:
        output, lse = contiguous(output, ring, rows), contiguous(lse, ring, 2)
    return (output, lse) if call.sinks is None else combine_by_lse([(output, lse)], kernel.layout, call.sinks)


def _with_bias_in_score(call: LocalCall) -> LocalCall:
    """The call with its bias as the last step of its score, whose arrays are cut for the keys of each step around the ring."""
    if call.bias is None:
        return call
    bias = call.bias.astype(call.softmax_dtype)
    arrays = (*call.captures, bias, 0 * bias[:1, :1, :1, :1])
    before = call.score or Steps((), (), False)
    steps = (*before.steps, Add((len(arrays) - 2, len(arrays) - 1)))
    score = replace(before, steps=steps, forms=(*before.forms, "aligned", "aligned"))
    return replace(call, bias=None, score=score, captures=arrays)


def _captures_in_zigzag(call: LocalCall, ring: Ring) -> tuple[jax.Array, ...]:
    """The score's arrays with their rows in the order of the queries."""
    if not ring.zigzag or call.score is None:
        return call.captures

    def moved(x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
        return zigzag(x, ring, dims.index("q")) if "q" in dims and x.shape[dims.index("q")] > 1 else x

    return tuple(moved(x, call.score.dims(n)) for n, x in enumerate(call.captures))


def _rows_in_zigzag(mask: Mask, ring: Ring) -> Mask:
    """The mask with its arrays' rows in the order of the queries; along the keys they are complete."""
    structure, leaves = mask.split()

    def moved(x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
        for axis, dim in enumerate(dims):
            if dim == "q" and x.shape[axis] > 1:
                x = zigzag(x, ring, axis)
        return x

    return structure.merge(tuple(moved(jax.numpy.asarray(leaf.array), leaf.dims) for leaf in leaves))
