"""A short causal convolution along the tokens, each channel by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .over_rows import Rows, started, written

__all__ = ["causal_conv", "conv_over_rows", "last_tokens"]


def causal_conv(tokens: jax.Array, weight: jax.Array, bias: jax.Array | None, documents: jax.Array | None) -> jax.Array:
    """[batch, n, channels] in float32: the sum of weight[width - 1 - m] times the token m before, for m < width.

    tokens [batch, width - 1 + n, channels]: those before the first, then all; weight [width, channels]; bias [channels];
    documents int32 [batch, width - 1 + n]: a token sees those of its own."""
    width = weight.shape[0]
    count = tokens.shape[1] - width + 1
    weight, tokens = weight.astype(jnp.float32), tokens.astype(jnp.float32)
    shape = (tokens.shape[0], count, tokens.shape[2])
    total = jnp.zeros(shape, jnp.float32)
    if bias is not None:
        total = total + bias.astype(jnp.float32)[None, None]
    for start in range(width):
        term = tokens[:, start : start + count] * weight[start][None, None]
        if documents is not None and start < width - 1:
            seen = documents[:, start : start + count] == documents[:, width - 1 :]
            term = jnp.where(seen[..., None], term, 0)
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
    """(outputs [tokens, channels] in float32, the slots after it) of the rows of a ragged batch.

    tokens [tokens, channels]; slots [slots, width - 1, channels]: the tokens before those of a row."""
    count, kept, dtype = tokens.shape[0], weight.shape[0] - 1, tokens.dtype
    before = started(slots, rows).astype(dtype)
    numbers = jnp.pad(rows.row_of(count), (kept, 0), constant_values=-1)[None]
    outputs = causal_conv(jnp.pad(tokens, ((kept, 0), (0, 0)))[None], weight, bias, numbers)[0]
    # What earlier tokens add to the first ones of a row.
    early = jnp.pad(before, ((0, 0), (0, kept), (0, 0)))
    added = causal_conv(early, weight, None, None)
    place = jnp.arange(kept, dtype=jnp.int32)[None]
    at = jnp.where(place < rows.lengths[:, None], rows.starts[:, None] + place, count)
    outputs = outputs.at[at].add(added, mode="drop")
    for column in range(rows.write.shape[1]):
        place = rows.lengths[:, None] - np.int32(column + kept) + jnp.arange(kept, dtype=jnp.int32)[None]
        of_row = jnp.take(
            tokens, jnp.where(place >= 0, rows.starts[:, None] + place, count), axis=0, mode="fill", fill_value=0
        )
        of_slot = jnp.take_along_axis(before, jnp.clip(place + np.int32(kept), 0, kept - 1)[..., None], 1)
        last = jnp.where((place >= 0)[..., None], of_row, of_slot)
        slots = written(slots, rows.write[:, column], last)
    return outputs, slots
