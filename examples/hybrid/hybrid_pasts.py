"""How a model's layers get at what came before their tokens: not at all (whole sequences), or in dense arrays.

A past runs the declared operations of a layer, by its number: `attend`, `convolve` and `recur`. After the layers it holds what
they keep for the next tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from hybrid_model import Model
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Whole:
    """Nothing came before: tokens [batch, time] are whole sequences, as in training."""

    def __init__(self, model: Model, tokens: jax.Array) -> None:
        self.layers = model.layers
        self.positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        self._mesh = model.mesh

    def placed(self, x: jax.Array) -> jax.Array:
        """x [batch, time, hidden] with its batch and its tokens split, if there is a mesh."""
        return (
            x if self._mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, P("dp", "sp")))
        )

    def attend(self, number: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return self.layers[number].attention(query, key, value, mode="train").attention_outputs

    def convolve(self, number: int, x: jax.Array, weight: jax.Array, **arrays: jax.Array) -> jax.Array:
        return self.layers[number].convolution(x, weight, **arrays, mode="train").attention_outputs

    def recur(self, number: int, *arrays: jax.Array, **more: jax.Array) -> jax.Array:
        return self.layers[number].recurrence(*arrays, **more, mode="train").attention_outputs


Cache = dict[str, Any]  # "length" int32 [batch], and of each layer's number the arrays that it keeps


def empty_cache(model: Model, batch: int, capacity: int) -> Cache:
    """Zeros of the arrays that each layer keeps of `batch` sequences, by its number: of attention key and value
    [batch, capacity, kv heads, dim]; of a recurrence its state, and the last tokens of its convolution."""
    cache: Cache = {"length": jnp.zeros(batch, jnp.int32)}
    for number, layer in enumerate(model.layers):
        kept = layer.declared.cache(capacity)
        cache[str(number)] = {name: jnp.zeros((batch, *x.shape), x.dtype) for name, x in kept.items()}
    return cache


class Dense:
    """The past is in a cache of `empty_cache`. Of the tokens [batch, time] the first `count` [batch] of each row are new, the
    others padding, whose logits mean nothing. `cache` holds the past of the next tokens."""

    def __init__(self, model: Model, tokens: jax.Array, cache: Cache, count: jax.Array) -> None:
        self.layers, self._start, self._count = model.layers, cache["length"], count
        self.positions = self._start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        self._old, self.cache = cache, {"length": self._start + count}
        self.cache |= {name: {} for name in cache if name != "length"}

    def placed(self, x: jax.Array) -> jax.Array:
        return x

    def attend(self, number: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Attend to the keys up to the last new one. Padding is written, too: the next tokens take its place."""
        old, time = self._old[str(number)], query.shape[1]
        write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0, 0)))
        kept = {"key": write(old["key"], key, self._start), "value": write(old["value"], value, self._start)}
        self.cache[str(number)] |= kept
        attention = self.layers[number].attention
        return attention(query, *kept.values(), kv_lengths=self._start + time, mode="autoregressive").attention_outputs

    def convolve(self, number: int, x: jax.Array, weight: jax.Array, **arrays: jax.Array) -> jax.Array:
        return self._carried("convolution", number, x, weight, **arrays)

    def recur(self, number: int, *arrays: jax.Array, **more: jax.Array) -> jax.Array:
        return self._carried("state", number, *arrays, **more)

    def _carried(self, name: str, number: int, *arrays: jax.Array, **more: jax.Array) -> jax.Array:
        layer = self.layers[number]
        operation = layer.convolution if name == "convolution" else layer.recurrence
        old = self._old[str(number)][name]
        found = operation(*arrays, **more, initial_state=old, lengths=self._count, mode="autoregressive")
        self.cache[str(number)][name] = found.state
        return found.attention_outputs
