"""Ring attention: the queries of a device stay, keys and values travel around a mesh axis, and outputs are merged by their lse.

The backward pass sends keys and values around once more, and with them the sums of their own gradients. Nothing of another
device is kept: the memory is that of one part of the keys, in both passes.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .kernels.operands import Operands, Places, Traced
from .kernels.part import PartKernel, differentiable
from .local import Ring, by_row
from .local_mask import Dropout, LocalMask

__all__ = ["merged", "ring_attention", "with_sinks"]


@dataclass(frozen=True)
class _Around:
    """A kernel whose keys come around a ring, as one kernel over the keys of all devices."""

    kernel: PartKernel
    ring: Ring
    dims: tuple[tuple[str, ...], ...]  # of the mask's arrays

    @property
    def layout(self) -> str:
        return self.kernel.layout

    @property
    def names(self) -> tuple[str, str]:
        return self.kernel.names

    def attend(self, places: Places, operands: Operands, traced: Traced) -> tuple[jax.Array, jax.Array]:
        return _forward(_Static(self.kernel, self.ring, places, self.dims), operands, traced)

    def differentiate(self, places: Places, operands: Operands, traced: Traced, *rest: jax.Array) -> Operands:
        output, lse, d_output, d_lse = rest
        static = _Static(self.kernel, self.ring, places, self.dims)
        return _backward(static, operands, traced, output, lse, d_output, d_lse)


@dataclass(frozen=True)
class _Static:
    kernel: PartKernel
    ring: Ring
    places: Places
    dims: tuple[tuple[str, ...], ...]


def ring_attention(
    kernel: PartKernel, ring: Ring, operands: Operands, mask: LocalMask, dropout: Dropout | None
) -> tuple[jax.Array, jax.Array]:
    """Return (output, lse), as the kernel gives them, of this device's queries and the keys of all devices.

    The mask's `k_start` and `kv_len` are those of this device's own keys; its arrays hold this device's rows and all keys.
    """
    dims = tuple(leaf.dims for leaf in mask.mask.split()[1])
    return differentiable(_Around(kernel, ring, dims), operands, mask, dropout)


def with_sinks(output: jax.Array, lse: jax.Array, sinks: jax.Array, layout: str) -> tuple[jax.Array, jax.Array]:
    """What a sink [heads] makes of the output and the lse of all keys: it joins the denominator."""
    both = jnp.logaddexp(lse, sinks[None, :, None].astype(lse.dtype))
    return (output * by_row(jnp.exp(lse - both), layout)).astype(output.dtype), both


def _forward(static: _Static, operands: Operands, traced: Traced) -> tuple[jax.Array, jax.Array]:
    layout = static.kernel.layout

    def hop(distance: Any, keys: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part = operands._replace(key=keys[0], value=keys[1])
        output, lse = static.kernel.attend(_elsewhere(static.places), part, _seen_from(static, traced, distance))
        return output.astype(jnp.float32), lse

    def step(carry: Any, distance: Any, by: int) -> Any:
        keys, (output, lse) = carry
        keys = _moved(keys, static.ring, by)
        more, more_lse = hop(distance, keys)
        return keys, merged(output, lse, more, more_lse, layout)

    keys = operands.key, operands.value
    carry = keys, hop(0, keys)
    output, lse = _along(static.ring, step, carry)[1]
    return output.astype(operands.query.dtype), lse


def _backward(
    static: _Static,
    operands: Operands,
    traced: Traced,
    output: jax.Array,
    lse: jax.Array,
    d_output: jax.Array,
    d_lse: jax.Array,
) -> Operands:
    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))

    def hop(distance: Any, keys: tuple[jax.Array, jax.Array]) -> Any:
        part = operands._replace(key=keys[0], value=keys[1])
        traced_there = _seen_from(static, traced, distance)
        found = static.kernel.differentiate(
            _elsewhere(static.places), part, traced_there, output, lse, d_output.astype(output.dtype), d_lse
        )
        return wide(found.query), wide((found.key, found.value))

    def step(carry: Any, distance: Any, by: int) -> Any:
        keys, d_query, d_keys = carry
        keys, d_keys = _moved((keys, d_keys), static.ring, by)
        more_query, more_keys = hop(distance, keys)
        return keys, d_query + more_query, jax.tree.map(jnp.add, d_keys, more_keys)

    # The keys wait for the gradient: else XLA takes these hops for those of the forward pass, and keeps every part for them.
    *keys, d_output = lax.optimization_barrier((operands.key, operands.value, d_output))
    keys = tuple(keys)
    _, d_query, d_keys = _along(static.ring, step, (keys, *hop(0, keys)))
    d_key, d_value = _moved(d_keys, static.ring, -static.ring.hops[-1])  # home
    return Operands(
        d_query.astype(operands.query.dtype),
        d_key.astype(operands.key.dtype),
        d_value.astype(operands.value.dtype),
        None,
        None,
    )


def _along(ring: Ring, step: Any, carry: Any) -> Any:
    """Fold over the hops after the first: step(carry, distance, how far the keys move before it)."""
    hops = ring.hops
    if ring.scan and len(hops) > 2 and hops == tuple(range(len(hops))):
        distances = jnp.arange(1, len(hops), dtype=jnp.int32)
        return lax.scan(lambda carry, distance: (step(carry, distance, 1), None), carry, distances)[0]
    for before, distance in itertools.pairwise(hops):
        carry = step(carry, distance, distance - before)
    return carry


def merged(
    output: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array, layout: str
) -> tuple[jax.Array, jax.Array]:
    """(output, lse) over the keys of both; outputs float32. A row that sees nothing in either stays 0 and -inf."""
    peak = jnp.maximum(lse, other_lse)
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    first, second = jnp.exp(lse - peak), jnp.exp(other_lse - peak)
    total = first + second
    safe = jnp.where(total == 0, 1, total)
    both = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
    return output * by_row(first / safe, layout) + other * by_row(second / safe, layout), both


def _elsewhere(places: Places) -> Places:
    """The places of a hop: where its keys begin is traced."""
    return replace(places, k_start=None)


def _seen_from(static: _Static, traced: Traced, distance: Any) -> Traced:
    """What is traced, for keys that have come `distance` shards."""
    ring = static.ring
    source = (lax.axis_index(ring.axes) - distance) % ring.size
    start = (source * static.places.kv_len).astype(jnp.int32)
    leaves = tuple(
        _cut(x, dims, start, static.places.kv_len) for x, dims in zip(traced.leaves, static.dims, strict=True)
    )
    return traced._replace(leaves=leaves, k_start=start)


def _cut(x: jax.Array, dims: tuple[str, ...], start: jax.Array, length: int) -> jax.Array:
    """An array's part for the keys from `start` on; sizes of 1 stand for all."""
    for axis, dim in enumerate(dims):
        if dim == "kv" and x.shape[axis] > 1:
            x = lax.dynamic_slice_in_dim(x, start, length, axis)
    return x


def _moved(tree: Any, ring: Ring, by: int) -> Any:
    """Every array from the device that stands `by` shards before this one."""
    by %= ring.size
    if by == 0:
        return tree
    pairs = [(i, (i + by) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axes, pairs), tree)
