"""A decoder of SmolLM2's class over a paged cache: RMSNorm, rotary positions, grouped queries, SwiGLU; embeddings tied to logits.

Activations are columns, [features, tokens], and weights are as in their file, [out, in]: `weight @ x`. On a CPU XLA multiplies
a few columns two to three times as fast as a few rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from step_engine import Sampled, greedy

from attnops.operators.paged_cache import CacheState, RaggedBatch


class Sizes(NamedTuple):
    """The sizes of a model of this class; `heads` query heads share `kv_heads` kv heads."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    hidden: int
    vocabulary: int
    rotary_base: float = 100_000.0
    epsilon: float = 1e-5


class Layer(NamedTuple):
    """Weights of one layer, [out, in]; norms [width]."""

    attention_norm: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array
    output: jax.Array
    hidden_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Weights(NamedTuple):
    embedding: jax.Array  # [vocabulary, width]
    norm: jax.Array
    layers: tuple[Layer, ...]


def step(
    sizes: Sizes,
    attention: Any,
    weights: Weights,
    state: CacheState,
    tokens: jax.Array,
    positions: jax.Array,
    wanted: jax.Array,
    batch: RaggedBatch,
    *,
    max_q_len: int | None = None,
) -> tuple[Sampled, CacheState]:
    """Run tokens int32 [tokens] at `positions` of their sequences; greedy choices at the indices `wanted`.

    `attention` is the operation `paged`: it writes each layer's keys and values into their pages, and attends.
    """
    dtype = jnp.dtype(state.cache.dtype)
    x = weights.embedding[tokens].T
    turn = _angles(sizes, positions)

    def heads(x: jax.Array, turned: bool) -> jax.Array:  # [tokens, heads, head_dim]
        split = x.reshape(-1, sizes.head_dim, x.shape[1])
        return (_rotary(split, *turn) if turned else split).transpose(2, 0, 1).astype(dtype)

    for number, layer in enumerate(weights.layers):
        h = _norm(x, layer.attention_norm, sizes.epsilon)
        query, key, value = heads(layer.query @ h, True), heads(layer.key @ h, True), heads(layer.value @ h, False)
        found = attention(query, key, value, state=state, layer=number, batch=batch, max_q_len=max_q_len)
        mixed, state = found.attention_outputs, found.state
        x = x + layer.output @ mixed.reshape(len(tokens), -1).T.astype(x.dtype)
        h = _norm(x, layer.hidden_norm, sizes.epsilon)
        x = x + layer.down @ (jax.nn.silu(layer.gate @ h) * (layer.up @ h))
    return greedy(weights.embedding @ _norm(x[:, wanted], weights.norm, sizes.epsilon)), state


def products(weights: Weights, x: jax.Array) -> jax.Array:
    """All products of a step with its weights, and nothing else, for x [width, tokens]: the least work of a step."""
    for layer in weights.layers:
        inner = layer.query @ x
        kept = (layer.key @ x).sum(0) + (layer.value @ x).sum(0)
        x = layer.output @ inner + kept
        x = layer.down @ (layer.gate @ x + layer.up @ x)
    return (weights.embedding @ x).sum(0)


def _norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=0, keepdims=True) + epsilon) * weight[:, None]


def _angles(sizes: Sizes, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    frequency = sizes.rotary_base ** (-np.arange(0, sizes.head_dim, 2, dtype=np.float32) / sizes.head_dim)
    angle = frequency.astype(np.float32)[:, None] * positions.astype(jnp.float32)[None]
    return jnp.cos(angle), jnp.sin(angle)


def _rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate neighbouring pairs of [heads, head_dim, tokens], in the order of this class's GGUF files."""
    pairs = x.reshape(len(x), -1, 2, x.shape[2])
    even, odd, cos, sin = pairs[:, :, 0], pairs[:, :, 1], cos[None], sin[None]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=2).reshape(x.shape)


def fitted(sizes: Sizes, weights: Weights, kv_repeat: int, mesh: Mesh | None, axis: Any) -> Weights:
    """The weights for a cache that stores each kv head `kv_repeat` times and splits heads over the mesh's `axis`, or None.

    A head's copies share its queries evenly, so a group that doesn't divide is padded with heads of zeros: they attend, but
    contribute nothing. Query heads and the hidden layer are split; keys and values are computed on every device, and the
    cache takes each device's own.
    """
    group = sizes.heads // sizes.kv_heads
    missing = -group % kv_repeat

    def filled(x: jax.Array, at: int) -> jax.Array:
        """Add zeros after each group of heads; dimension `at` has heads * head_dim."""
        if not missing:
            return x
        lead, rest = x.shape[:at], x.shape[at + 1 :]
        grouped = jnp.reshape(x, (*lead, sizes.kv_heads, group, sizes.head_dim, *rest))
        fill = [(0, missing if n == at + 1 else 0) for n in range(grouped.ndim)]
        return jnp.pad(grouped, fill).reshape(*lead, -1, *rest)

    made = weights._replace(
        layers=tuple(w._replace(query=filled(w.query, 0), output=filled(w.output, 1)) for w in weights.layers)
    )
    if mesh is None:
        return jax.device_put(made)
    count = (
        1 if axis is None else int(np.prod([mesh.shape[name] for name in ([axis] if isinstance(axis, str) else axis)]))
    )
    hidden = axis if sizes.hidden % count == 0 else None
    specs = dict.fromkeys(Layer._fields, P())
    specs |= {"query": P(axis), "output": P(None, axis), "gate": P(hidden), "up": P(hidden), "down": P(None, hidden)}
    places = Weights(P(), P(), (Layer(**specs),) * sizes.layers)
    return jax.device_put(made, jax.tree.map(lambda spec: NamedSharding(mesh, spec), places))
