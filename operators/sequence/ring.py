"""Ring attention: a device keeps its queries, keys and values travel around a mesh axis, and outputs are merged by their lse.

The backward pass sends keys and values around once more, together with the sums of their own gradients. A device stores nothing
of another's: both passes need memory for one part of the keys.

On a zigzag ring a device has two chunks of the sequence (zigzag.py). After the first step every device has two pairs left of
a chunk of its queries with a chunk of the keys: its later queries with the earlier keys and, depending on where the keys come
from, either the earlier with the earlier or the later with the later. Which of them is traced, the work is the same.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...masks import Full
from ...planning.sequence.split import loop_from
from ...scores.steps import Steps
from ..call.local import Ring
from ..kernels.default_promotion import wider
from ..kernels.local_mask import Dropout, LocalMask
from ..kernels.lse import combine_by_lse
from ..kernels.operands import DynamicArgs, Operands, Results, StaticArgs
from ..kernels.partial_attention import PartialAttention, attend_partial, differentiable, differentiate_partial

__all__ = ["ring_attention"]

_Keys = tuple[jax.Array, jax.Array | None]  # keys, and values that aren't a part of them


@dataclass(frozen=True)
class _RingKernel:
    """A kernel whose keys come around a ring, as one kernel over the keys of all devices."""

    kernel: PartialAttention
    ring: Ring
    dims: tuple[tuple[str, ...], ...]  # of the mask's arrays
    captured: tuple[tuple[str, ...], ...]  # of the score's

    @property
    def layout(self) -> str:
        return self.kernel.layout

    @property
    def title(self) -> str:
        return f"{self.kernel.title} around a ring"

    @property
    def names(self) -> tuple[str, str]:
        return self.kernel.names

    def attend(self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs) -> tuple[jax.Array, jax.Array]:
        return _forward(self, static_args, operands, dynamic)

    def differentiate(
        self, static_args: StaticArgs, operands: Operands, dynamic: DynamicArgs, results: Results
    ) -> Operands:
        return _backward(self, static_args, operands, dynamic, results)


def ring_attention(
    kernel: PartialAttention,
    ring: Ring,
    operands: Operands,
    mask: LocalMask,
    dropout: Dropout | None,
    score: Steps | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (output, lse), in the kernel's form, of this device's queries and the keys of all devices.

    The mask's `k_start` and `kv_len` are those of this device's own keys; its arrays hold this device's rows and all keys, as do
    those of the score.
    """
    dims = tuple(leaf.dims for leaf in mask.mask.split()[1])
    captured = () if score is None else tuple(score.dims(n) for n in range(len(score.forms)))
    return differentiable(_RingKernel(kernel, ring, dims, captured), operands, mask, dropout, score)


class _Pair(NamedTuple):
    """Which chunk of this device's queries sees which chunk of the current keys; traced where devices differ.

    behind: the queries' chunk comes later than the keys'.
    """

    query: int | jax.Array
    keys: int | jax.Array
    behind: bool = False


def _first_pairs(ring: Ring) -> tuple[_Pair, ...]:
    """Pairs with this device's own keys; the first ones begin each chunk of the queries."""
    return (_Pair(0, 0), _Pair(1, 0, True), _Pair(1, 1)) if ring.zigzag else (_Pair(0, 0),)


def _pairs(ring: Ring, distance: Any) -> tuple[_Pair, ...]:
    """Pairs with keys that have moved `distance` shards."""
    if not ring.zigzag:
        return (_Pair(0, 0),)
    # Keys of a later device: their early chunk is after our early queries, their late chunk before our late ones.
    same = jnp.where(lax.axis_index(ring.axes) < distance, 1, 0)
    return _Pair(1, 0, True), _Pair(same, same, True)


def _forward(
    ring_kernel: _RingKernel, whole: StaticArgs, operands: Operands, dynamic: DynamicArgs
) -> tuple[jax.Array, jax.Array]:
    layout, ring = ring_kernel.layout, ring_kernel.ring
    rows = layout.index("t")

    def attend(pair: _Pair, keys: _Keys, distance: Any) -> tuple[jax.Array, jax.Array]:
        static_args, here = _seen(ring_kernel, whole, dynamic, pair, distance)
        part = _of_pair(ring_kernel, operands, pair, keys, _start(here), static_args.kv_len)
        output, lse = attend_partial(ring_kernel.kernel, static_args, part, here)
        return output.astype(lse.dtype), lse

    def add_pairs(partial: tuple[jax.Array, jax.Array], pairs: tuple[_Pair, ...], keys: _Keys, distance: Any) -> Any:
        output, lse = partial
        for pair in pairs:
            before = _chunk(output, pair.query, ring, rows), _chunk(lse, pair.query, ring, 2)
            both, both_lse = combine_by_lse([before, attend(pair, keys, distance)], layout)
            output, lse = (
                _put_chunk(output, both, pair.query, ring, rows),
                _put_chunk(lse, both_lse, pair.query, ring, 2),
            )
        return output, lse

    def step_pairs(keys: _Keys, partial: Any, distance: Any, by: int) -> Any:
        del by  # only keys travel
        return add_pairs(partial, _pairs(ring, distance), keys, distance)

    keys, first = (operands.key, operands.value), _first_pairs(ring)
    begun = [attend(pair, keys, 0) for pair in first[: ring.chunks]]
    output, lse = (jnp.concatenate(x, axis) for x, axis in zip(zip(*begun, strict=True), (rows, 2), strict=True))
    partial = add_pairs((output, lse), first[ring.chunks :], keys, 0)
    output, lse = _fold_steps(ring, ring.steps, step_pairs, keys, partial)
    return output.astype(operands.query.dtype), lse


def _backward(
    ring_kernel: _RingKernel, whole: StaticArgs, operands: Operands, dynamic: DynamicArgs, whole_results: Results
) -> Operands:
    layout, ring = ring_kernel.layout, ring_kernel.ring
    rows = layout.index("t")
    output, lse, d_output, d_lse = whole_results
    d_output = d_output.astype(output.dtype)

    def add_pairs(gradients: Any, pairs: tuple[_Pair, ...], keys: _Keys, distance: Any) -> Any:
        d_query, d_keys, d_captures = gradients
        for pair in pairs:
            static_args, here = _seen(ring_kernel, whole, dynamic, pair, distance)
            start = _start(here)
            part = _of_pair(ring_kernel, operands, pair, keys, start, static_args.kv_len)
            of_rows = ((output, rows), (lse, 2), (d_output, rows), (d_lse, 2))
            results = Results(*(_chunk(x, pair.query, ring, axis) for x, axis in of_rows))
            share = differentiate_partial(ring_kernel.kernel, static_args, part, here, results)
            d_query = _add_chunk(d_query, share.query, pair.query, ring, rows)
            to_keys = functools.partial(_add_chunk, chunk=pair.keys, ring=ring, axis=rows)
            d_keys = jax.tree.map(to_keys, d_keys, (share.key, share.value))
            d_captures = tuple(
                _add_cut(x, d, dims, start, pair.query)
                for x, d, dims in zip(d_captures, share.captures, ring_kernel.captured, strict=True)
            )
        return d_query, d_keys, d_captures

    def step_pairs(keys: _Keys, gradients: Any, distance: Any, by: int) -> Any:
        d_query, d_keys, d_captures = gradients
        return add_pairs((d_query, _permuted(d_keys, ring, by), d_captures), _pairs(ring, distance), keys, distance)

    # The keys wait for the gradient, and travel the other way: otherwise XLA reuses the forward pass's steps,
    # and keeps every part for them. (XLA:CPU ignores the barrier.)
    keys, d_output = lax.optimization_barrier(((operands.key, operands.value), d_output))
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, wider(x.dtype, jnp.float32)), (operands.query, keys))
    wide = (*sums, tuple(jnp.zeros_like(x) for x in operands.captures))
    gradients = add_pairs(wide, _first_pairs(ring), keys, 0)
    steps = (0, *reversed(ring.steps[1:]))
    d_query, d_keys, d_captures = _fold_steps(ring, steps, step_pairs, keys, gradients)
    d_keys = jax.tree.map(lambda d, x: d.astype(x.dtype), d_keys, keys)
    d_key, d_value = _permuted(d_keys, ring, -steps[-1])  # back home
    return Operands(d_query.astype(operands.query.dtype), d_key, d_value, None, None, captures=d_captures)


def _fold_steps(ring: Ring, steps: tuple[int, ...], step_pairs: Any, keys: _Keys, state: Any) -> Any:
    """Fold over the steps after the first: step_pairs(keys, state, distance, how far they moved to get here).

    In a loop the next step's keys are sent before the work on the current ones, and don't wait for it.
    """
    moves = [after - before for before, after in itertools.pairwise(steps)]
    alike = loop_from(steps) if ring.scan else None
    for distance, by in zip(steps[1:] if alike is None else steps[1 : alike + 1], moves, strict=False):
        keys = _permuted(keys, ring, by)
        state = step_pairs(keys, state, distance, by)
    if alike is None:
        return state

    def step(carry: Any, distance: Any) -> Any:
        keys, state = carry
        return (_permuted(keys, ring, by), step_pairs(keys, state, distance, by)), None

    by = moves[-1]
    carry = _permuted(keys, ring, by), state
    (keys, state), _ = lax.scan(step, carry, jnp.asarray(steps[alike + 1 : -1], jnp.int32))
    return step_pairs(keys, state, steps[-1], by)


def _of_pair(
    ring_kernel: _RingKernel, operands: Operands, pair: _Pair, keys: _Keys, start: jax.Array, kv_len: int
) -> Operands:
    ring, rows = ring_kernel.ring, ring_kernel.layout.index("t")
    return operands._replace(
        query=_chunk(operands.query, pair.query, ring, rows),
        key=_chunk(keys[0], pair.keys, ring, rows),
        value=None if keys[1] is None else _chunk(keys[1], pair.keys, ring, rows),
        captures=tuple(
            _cut(x, dims, start, kv_len, pair.query, ring)
            for x, dims in zip(operands.captures, ring_kernel.captured, strict=True)
        ),
    )


def _seen(
    ring_kernel: _RingKernel, whole: StaticArgs, dynamic: DynamicArgs, pair: _Pair, distance: Any
) -> tuple[StaticArgs, DynamicArgs]:
    """The places of a pair for keys that have moved `distance` shards, and its traced values."""
    ring = ring_kernel.ring
    here = lax.axis_index(ring.axes)
    q_len, kv_len = (n // ring.chunks for n in (whole.q_len, whole.kv_len))
    start = (_chunk_index(ring, (here - distance) % ring.size, pair.keys) * kv_len).astype(jnp.int32)
    leaves = tuple(
        _cut(x, dims, start, kv_len, pair.query, ring) for x, dims in zip(dynamic.leaves, ring_kernel.dims, strict=True)
    )
    static_args = replace(whole, q_len=q_len, kv_len=kv_len, k_start=None)
    if pair.behind and ring.full_chunk_pairs:
        static_args, leaves = replace(static_args, mask=Full()), ()
    dynamic = dynamic._replace(leaves=leaves, k_start=start)
    if ring.zigzag:
        static_args = replace(static_args, q_start=None)
        dynamic = dynamic._replace(q_start=(_chunk_index(ring, here, pair.query) * q_len).astype(jnp.int32))
    return static_args, dynamic


def _chunk_index(ring: Ring, device: Any, chunk: Any) -> Any:
    """Which part of the whole sequence a device's chunk is."""
    return jnp.where(chunk == 0, device, 2 * ring.size - 1 - device) if ring.zigzag else device


def _chunk(x: jax.Array, chunk: Any, ring: Ring, axis: int) -> jax.Array:
    if not ring.zigzag:
        return x
    half = x.shape[axis] // 2
    return lax.dynamic_slice_in_dim(x, chunk * half, half, axis)


def _put_chunk(x: jax.Array, part: jax.Array, chunk: Any, ring: Ring, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, chunk * part.shape[axis], axis) if ring.zigzag else part


def _add_chunk(x: jax.Array, part: jax.Array, chunk: Any, ring: Ring, axis: int) -> jax.Array:
    return _put_chunk(x, _chunk(x, chunk, ring, axis) + part.astype(x.dtype), chunk, ring, axis)


def _cut(x: jax.Array, dims: tuple[str, ...], start: jax.Array, length: int, chunk: Any, ring: Ring) -> jax.Array:
    """A mask's array for the keys from `start` on and a chunk of the rows; sizes of 1 cover everything."""
    for axis, dim in enumerate(dims):
        if dim == "kv" and x.shape[axis] > 1:
            x = lax.dynamic_slice_in_dim(x, start, length, axis)
        if dim == "q" and x.shape[axis] > 1:
            x = _chunk(x, chunk, ring, axis)
    return x


def _add_cut(x: jax.Array, part: jax.Array, dims: tuple[str, ...], start: jax.Array, chunk: Any) -> jax.Array:
    """x with the gradient of what `_cut` made added in its place."""
    places: list[Any] = [0] * x.ndim
    for axis, dim in enumerate(dims):
        if dim in ("q", "kv") and x.shape[axis] > part.shape[axis]:
            places[axis] = start if dim == "kv" else chunk * part.shape[axis]
    old = lax.dynamic_slice(x, places, part.shape)
    return lax.dynamic_update_slice(x, old + part.astype(x.dtype), places)


def _start(dynamic: DynamicArgs) -> jax.Array:
    assert dynamic.k_start is not None
    return dynamic.k_start


def _permuted(tree: Any, ring: Ring, by: int) -> Any:
    """Every array, received from the device `by` shards before this one."""
    by %= ring.size
    if by == 0:
        return tree
    pairs = [(i, (i + by) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axes, pairs), tree)
