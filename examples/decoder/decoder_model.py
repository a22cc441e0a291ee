"""A small decoder in the style of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU; in flax nnx.

Nothing here names a kernel, a mesh or a mask: the attention is passed in, as declared (attention.json), and the same module
trains, prefills a cache and decodes from it. Shapes: tokens int [batch, time], logits float32 [batch, time, vocabulary].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from attnops import Attention


class Sizes(NamedTuple):
    vocabulary: int
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 352


class Cache(NamedTuple):
    """Keys and values of every layer, [batch, capacity, kv heads, head dim]; the first `length` rows of each batch row count."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array  # int32 [batch]


def empty_cache(sizes: Sizes, batch: int, capacity: int) -> Cache:
    zeros = jnp.zeros((batch, capacity, sizes.kv_heads, sizes.head_dim))
    return Cache((zeros,) * sizes.layers, (zeros,) * sizes.layers, jnp.zeros(batch, jnp.int32))


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate pairs of numbers of [batch, time, heads, dim] by angles that grow with the position [batch, time]."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class GroupedQueryAttention(nnx.Module):
    def __init__(self, sizes: Sizes, attend: Attention, rngs: nnx.Rngs) -> None:
        self.attend, self.sizes = attend, sizes
        width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.query = nnx.Linear(sizes.dim, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(sizes.dim, kv_width, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(sizes.dim, kv_width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, sizes.dim, use_bias=False, rngs=rngs)

    def __call__(
        self, x: jax.Array, mode: str, start: jax.Array, cached: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        batch, time = x.shape[:2]
        positions = start[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
        split = lambda y: y.reshape(batch, time, -1, self.sizes.head_dim)  # noqa: E731
        query, key = (rotary(split(y), positions) for y in (self.query(x), self.key(x)))
        value = split(self.value(x))
        if cached is not None:
            write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0, 0)))
            cached = write(cached[0], key, start), write(cached[1], value, start)
        if mode == "autoregressive":
            assert cached is not None
            out = self.attend(query, *cached, kv_lengths=start + time, mode=mode)
        else:  # train, or prefill of an empty cache: there are only the new tokens
            out = self.attend(query, key, value, mode=mode)
        return self.out(out.attention_outputs.reshape(batch, time, -1)), cached


class SwiGLU(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(sizes.dim, sizes.hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(sizes.dim, sizes.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(sizes.hidden, sizes.dim, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, attend: Attention, rngs: nnx.Rngs) -> None:
        self.attention = GroupedQueryAttention(sizes, attend, rngs)
        self.mlp = SwiGLU(sizes, rngs)
        self.before_attention = nnx.RMSNorm(sizes.dim, rngs=rngs)
        self.before_mlp = nnx.RMSNorm(sizes.dim, rngs=rngs)


class Decoder(nnx.Module):
    """tokens -> logits. With a cache, mode 'prefill' fills it and 'autoregressive' continues where it ends."""

    def __init__(self, sizes: Sizes, attend: Attention, rngs: nnx.Rngs) -> None:
        self.sizes = sizes
        self.embedding = nnx.Embed(sizes.vocabulary, sizes.dim, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, attend, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.dim, rngs=rngs)
        self.head = nnx.Linear(sizes.dim, sizes.vocabulary, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, mode: str = "train", cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        x = self.embedding(tokens)
        start = jnp.zeros(len(tokens), jnp.int32) if cache is None else cache.length
        made = []
        for number, block in enumerate(self.blocks):
            held = None if cache is None else (cache.keys[number], cache.values[number])
            out, held = block.attention(block.before_attention(x), mode, start, held)
            x = x + out
            x = x + block.mlp(block.before_mlp(x))
            made.append(held)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        if cache is None:
            return logits, None
        return logits, Cache(tuple(k for k, _ in made), tuple(v for _, v in made), start + tokens.shape[1])


# How the parameters are placed on the mesh, by the layer that holds them; the rest (norms, embedding) is whole on every device.
_SPECS = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), P("fsdp", "tp")),
    **dict.fromkeys(("out", "down"), P("tp", "fsdp")),
    "head": P("fsdp", "tp"),
}


def placed(model: Decoder, mesh: jax.sharding.Mesh) -> Decoder:
    """The model with its parameters placed on a mesh; a dimension that an axis doesn't divide isn't split."""

    def put(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        spec = next((_SPECS[str(part)] for part in path if str(part) in _SPECS), P())
        fitted = (axis if size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, x.shape, strict=False))
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*fitted)))

    graph, state = nnx.split(model)
    placed_state = jax.tree_util.tree_map_with_path(
        lambda path, x: put(tuple(getattr(part, "key", part) for part in path), x), state
    )
    return nnx.merge(graph, placed_state)
