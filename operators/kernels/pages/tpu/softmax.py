"""Online softmax of rows against blocks of keys, on values: from products to the rows' results.

Logits are in base 2 (times log2 e). The numbers of a row are repeated over 128 lanes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...lse import LN2, LOG2E
from ..paged_mask import chunk_start
from .geometry import LANES, NOTHING, Geometry, Options

__all__ = [
    "Columns",
    "Sums",
    "add",
    "begin",
    "finish",
    "in_lanes",
    "lane_chunks",
    "live_keys",
    "seen_keys",
    "spread",
    "weigh",
]


class Sums(NamedTuple):
    """Sums of rows: greatest logit and sum of weights, [rows, 128], and values times weights, [rows, value_dim]."""

    peak: jax.Array
    total: jax.Array
    weighted: jax.Array


class Columns(NamedTuple):
    """Per-head numbers passed as one array [n, heads, 128]; each field is its index there, or None."""

    sinks: int | None
    key_scale: int | None
    value_scale: int | None

    @classmethod
    def of(cls, geometry: Geometry, options: Options) -> Columns:
        present = options.sinks, geometry.key_scale in (0, 1), geometry.value_scale in (0, 1)
        return cls(*(sum(present[:i]) if present[i] else None for i in range(3)))

    @property
    def many(self) -> int:
        return sum(i is not None for i in self)


def spread(rows: jax.Array, width: int) -> jax.Array:
    """Numbers of rows, repeated over 128 lanes, over another width."""
    if width <= LANES:
        return rows[:, :width]
    return jnp.tile(rows, (1, -(-width // LANES)))[:, :width]


def begin(rows: int, width: int, sinks: jax.Array | None) -> Sums:
    """Sums of no key; a sink [rows, 128] is a key without a value."""
    weighted = jnp.zeros((rows, width), jnp.float32)
    if sinks is None:
        return Sums(jnp.full((rows, LANES), NOTHING, jnp.float32), jnp.zeros((rows, LANES), jnp.float32), weighted)
    peak = jnp.maximum(sinks * LOG2E, NOTHING)
    return Sums(peak, jnp.where(peak > NOTHING, 1.0, 0.0), weighted)


def weigh(options: Options, raw: jax.Array, key_scale: jax.Array | None) -> jax.Array:
    """Logits from products with keys; `key_scale` broadcasts to them."""
    if options.soft_cap is None:
        factor: Any = np.float32(options.scale * LOG2E)
        return raw * (factor if key_scale is None else key_scale * factor)
    factor = np.float32(options.scale / options.soft_cap)
    capped = jnp.tanh(raw * (factor if key_scale is None else key_scale * factor))
    return capped * np.float32(options.soft_cap * LOG2E)


def add(sums: Sums, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(weights, new peak, new total, factor that shrinks the weighted sum) after logits x [rows, keys]."""
    peak = jnp.maximum(sums.peak, x.max(axis=1, keepdims=True))
    p = jnp.exp2(x - spread(peak, x.shape[1]))
    shrink = jnp.exp2(sums.peak - peak)
    return p, peak, sums.total * shrink + p.sum(axis=1, keepdims=True), shrink


def finish(sums: Sums, value_scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(output [rows, value_dim] in float32, lse [rows, 128])."""
    empty = sums.total == 0
    safe = jnp.where(empty, 1.0, sums.total)
    factor = 1 / safe if value_scale is None else value_scale / safe
    output = sums.weighted * spread(factor, sums.weighted.shape[1])
    lse = jnp.where(empty, -jnp.inf, (sums.peak + jnp.log2(safe)) * np.float32(LN2))
    return output, lse


def in_lanes(rows: jax.Array) -> jax.Array:
    """Numbers of rows [rows, 128] laid along lanes: [ceil(rows / 128), 128]."""
    count = rows.shape[0]
    lane_rows = []
    for start in range(0, count, LANES):
        part = rows[start : min(start + LANES, count)]
        diagonal = lax.broadcasted_iota(jnp.int32, part.shape, 0) == lax.broadcasted_iota(jnp.int32, part.shape, 1)
        lane_rows.append(jnp.where(diagonal, part, 0.0).sum(axis=0, keepdims=True))
    return lane_rows[0] if len(lane_rows) == 1 else jnp.concatenate(lane_rows, axis=0)


def live_keys(
    geometry: Geometry,
    options: Options,
    first: Any,
    word: Any,
    keys: Any,
    lanes: int = 1,
    order: jax.Array | None = None,
    shard: Any = 0,
) -> tuple[jax.Array, jax.Array]:
    """(positions of a block's keys, which of them exist), both [1, keys * lanes], each key `lanes` times in a row, or in the
    `order` of these numbers. shard: which of the devices that have the sequences' pages in turn this is.

    Keys exist in a page that was fetched, within the sequence.
    """
    size = options.pages_per_block * geometry.page * lanes
    column = lax.broadcasted_iota(jnp.int32, (1, size), 1) if order is None else order
    place = divided(column, lanes) + first * np.int32(geometry.page)
    slot = divided(column, geometry.page * lanes)
    if options.stride > 1:  # pages of other devices are in between
        place = place + ((slot + first) * np.int32(options.stride - 1) + shard) * np.int32(geometry.page)
    fetched = (lax.shift_right_logical(jnp.full((1, size), word), slot) & 1) == 1
    return place, fetched & (place < keys)


def divided(x: jax.Array, by: int) -> jax.Array:
    """x // by for small non-negative numbers; the vector units have no such division."""
    if by & (by - 1) == 0:
        return lax.shift_right_logical(x, np.int32(by.bit_length() - 1))
    return jnp.floor((x.astype(jnp.float32) + 0.5) * np.float32(1 / by)).astype(jnp.int32)


def seen_keys(options: Options, seen: jax.Array, place: jax.Array, position: Any, row: Any = None) -> jax.Array:
    """Which of the existing keys a row at `position` sees; with `row`, those that far after it see."""
    first = position
    position = position if row is None else row + position
    if options.reach is not None:
        seen &= place <= position + np.int32(options.reach)
    if options.left is not None:
        seen &= place >= position - np.int32(options.left)
    if options.chunk is not None:
        begin = _chunk_start(options, first, row)
        seen &= place >= begin
        if not options.causal:
            seen &= place < begin + np.int32(options.chunk)
    return seen & (position >= 0)


def _chunk_start(options: Options, position: Any, row: Any) -> Any:
    """The first position of the chunk of the rows `row` after a position. Vector units divide only small numbers, such as the
    place of a row in a block; the scalar unit divides any."""
    assert options.chunk is not None
    size = np.int32(options.chunk)
    begin = chunk_start(position, options.chunk)
    if row is None:
        return begin
    place = jnp.maximum(position - begin + row, 0)
    if options.chunk > options.farthest:  # then a block is in two chunks at most
        return begin + jnp.where(place >= size, size, np.int32(0))
    return begin + divided(place, options.chunk) * size


def lane_chunks(rows: int) -> int:
    """How many rows of 128 lanes `in_lanes` returns."""
    return math.ceil(rows / LANES)
