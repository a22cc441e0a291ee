"""A short causal convolution along the tokens, each channel by itself."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .over_rows import Rows, started, written

__all__ = ["Convolution", "activated", "causal_conv", "conv_of_chunk", "conv_over_rows", "last_tokens"]


class Convolution(NamedTuple):
    """Of an array [tokens, heads, dim] of a step: weight [width, heads, dim], bias [heads, dim] or None, and slots [slots, width
    - 1, heads, dim]: the tokens before those of a row."""

    weight: jax.Array
    bias: jax.Array | None
    slots: jax.Array


def activated(x: jax.Array, activation: str | None) -> jax.Array:
    """The outputs of a convolution after its activation, 'silu' or none."""
    return jax.nn.silu(x) if activation == "silu" else x


def causal_conv(tokens: jax.Array, weight: jax.Array, bias: jax.Array | None, documents: jax.Array | None) -> jax.Array:
    """[batch, n, *channels] in float32: the sum of weight[width - 1 - m] times the token m before, for m < width.

    tokens [batch, width - 1 + n, *channels]: those before the first, then all; weight [width, *channels]; bias [*channels];
    documents int32 [batch, width - 1 + n]: a token sees those of its own."""
    width = weight.shape[0]
    count = tokens.shape[1] - width + 1
    weight, tokens = weight.astype(jnp.float32), tokens.astype(jnp.float32)
    shape = (tokens.shape[0], count, *tokens.shape[2:])
    total = jnp.zeros(shape, jnp.float32)
    if bias is not None:
        total = total + bias.astype(jnp.float32)[None, None]
    for start in range(width):
        term = tokens[:, start : start + count] * weight[start][None, None]
        if documents is not None and start < width - 1:
            seen = documents[:, start : start + count] == documents[:, width - 1 :]
            term = jnp.where(seen.reshape(*seen.shape, *[1] * (tokens.ndim - 2)), term, 0)
        total = total + term
    return total


def last_tokens(
    tokens: jax.Array, kept: int, documents: jax.Array | None, last: jax.Array | None, ends: jax.Array, low: jax.Array
) -> jax.Array:
    """The `kept` tokens that a next call needs: [batch, kept, channels], 0 for those that aren't in `tokens` from `low` on, and
    for those of another document than the last.

    tokens, documents: see causal_conv; last int32 [batch]: the last one's document; ends int32 [batch]: how many of the n tokens
    count, which may lie before or after them all; low: an int32.
    """
    at = ends[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    here = (at >= low) & (at < tokens.shape[1])
    index = jnp.clip(at, 0, tokens.shape[1] - 1)
    found = jnp.take_along_axis(tokens, index[..., None], 1)
    if documents is not None and last is not None:
        here &= jnp.take_along_axis(documents, index, 1) == last[:, None]
    return jnp.where(here[..., None], found, 0)


def conv_over_rows(
    tokens: jax.Array, weight: jax.Array, bias: jax.Array | None, slots: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """(outputs [tokens, *channels] in float32, the slots after it) of the rows of a ragged batch.

    tokens [tokens, *channels]; slots [slots, width - 1, *channels]: the tokens before those of a row."""
    channels = [1] * (tokens.ndim - 1)
    unpadded = [(0, 0)] * (tokens.ndim - 1)
    count, kept, dtype = tokens.shape[0], weight.shape[0] - 1, tokens.dtype
    before = started(slots, rows).astype(dtype)
    numbers = jnp.pad(rows.row_of(count), (kept, 0), constant_values=-1)[None]
    outputs = causal_conv(jnp.pad(tokens, ((kept, 0), *unpadded))[None], weight, bias, numbers)[0]
    # What earlier tokens add to the first ones of a row.
    early = jnp.pad(before, ((0, 0), (0, kept), *unpadded))
    added = causal_conv(early, weight, None, None)
    place = jnp.arange(kept, dtype=jnp.int32)[None]
    at = jnp.where(place < rows.lengths[:, None], rows.starts[:, None] + place, count)
    outputs = outputs.at[at].add(added, mode="drop")
    for column in range(rows.write.shape[1]):
        place = rows.lengths[:, None] - np.int32(column + kept) + jnp.arange(kept, dtype=jnp.int32)[None]
        of_row = jnp.take(
            tokens, jnp.where(place >= 0, rows.starts[:, None] + place, count), axis=0, mode="fill", fill_value=0
        )
        early_at = jnp.clip(place + np.int32(kept), 0, kept - 1)
        of_slot = jnp.take_along_axis(before, early_at.reshape(*early_at.shape, *channels), 1)
        last = jnp.where((place >= 0).reshape(*place.shape, *channels), of_row, of_slot)
        slots = written(slots, rows.write[:, column], last)
    return outputs, slots


def conv_of_chunk(
    tokens: jax.Array, one: Convolution, window: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(outputs [1, n, *channels] in float32, the window after it) of a row's next tokens, of which the first `count` count.

    window [1, width - 1, *channels]: the tokens before them."""
    both = jnp.concatenate([window.astype(tokens.dtype), tokens], 1)
    count = jnp.minimum(count, np.int32(tokens.shape[1]))
    after = lax.dynamic_slice_in_dim(both, count, window.shape[1], 1)
    return causal_conv(both, one.weight, one.bias, None), after.astype(window.dtype)
