"""A small video diffusion transformer: blocks of self-attention over all patches of all frames, and cross-attention to text.

Shapes: video float32 [batch, frames, rows, columns], text int32 [batch, letters] of which `lengths` count, time float32 [batch].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from attnops import Attention

FRAMES, SIDE, PATCH = 12, 12, 2
PATCHES = SIDE // PATCH
DIM, HEADS, LAYERS = 64, 2, 2
LETTERS, LONGEST_TEXT = 128, 32  # ASCII


def to_patches(video: jax.Array) -> jax.Array:
    """[batch, frames, rows, columns] as [batch, tokens, patch x patch]."""
    x = video.reshape(len(video), FRAMES, PATCHES, PATCH, PATCHES, PATCH)
    return x.transpose(0, 1, 2, 4, 3, 5).reshape(len(video), -1, PATCH * PATCH)


def from_patches(tokens: jax.Array) -> jax.Array:
    x = tokens.reshape(len(tokens), FRAMES, PATCHES, PATCHES, PATCH, PATCH)
    return x.transpose(0, 1, 2, 4, 3, 5).reshape(len(tokens), FRAMES, SIDE, SIDE)


class Attend(nnx.Module):
    """Queries from x, keys and values from what they attend to."""

    def __init__(self, attend: Attention, rngs: nnx.Rngs) -> None:
        self.attend = attend
        self.query, self.key, self.value, self.out = (nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(4))

    def __call__(self, x: jax.Array, seen: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        split = lambda y: y.reshape(*y.shape[:2], HEADS, -1)  # noqa: E731
        q, k, v = split(self.query(x)), split(self.key(seen)), split(self.value(seen))
        return self.out(self.attend(q, k, v, kv_lengths=lengths).attention_outputs.reshape(x.shape))


class Block(nnx.Module):
    """Self-attention and MLP, shifted and scaled by the noise level (adaLN), with cross-attention between them."""

    def __init__(self, of_video: Attention, of_text: Attention, rngs: nnx.Rngs) -> None:
        self.over_video, self.over_text = Attend(of_video, rngs), Attend(of_text, rngs)
        self.wide, self.narrow = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(DIM, use_scale=False, use_bias=False, rngs=rngs) for _ in range(3)])
        self.level = nnx.Linear(DIM, 6 * DIM, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array, level: jax.Array, text: jax.Array, lengths: jax.Array) -> jax.Array:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.split(self.level(nnx.silu(level))[:, None], 6, -1)
        seen = self.norms[0](x) * (1 + scale) + shift
        x = x + (1 + gate) * self.over_video(seen, seen)
        x = x + self.over_text(self.norms[1](x), text, lengths)
        inner = nnx.gelu(self.wide(self.norms[2](x) * (1 + mlp_scale) + mlp_shift))
        return x + (1 + mlp_gate) * self.narrow(inner)


class Denoiser(nnx.Module):
    """(noisy video, noise level, text) -> velocity: noise minus video."""

    def __init__(self, of_video: Attention, of_text: Attention, rngs: nnx.Rngs) -> None:
        self.inward, self.outward = nnx.Linear(PATCH * PATCH, DIM, rngs=rngs), nnx.Linear(DIM, PATCH * PATCH, rngs=rngs)
        self.place = nnx.Param(0.3 * jax.random.normal(rngs.params(), (FRAMES * PATCHES * PATCHES, DIM)))
        self.letters = nnx.Embed(LETTERS, DIM, rngs=rngs)
        self.letter_place = nnx.Param(0.3 * jax.random.normal(rngs.params(), (LONGEST_TEXT, DIM)))
        self.reader = nnx.Linear(DIM, DIM, rngs=rngs)
        self.level = nnx.Linear(DIM, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(of_video, of_text, rngs) for _ in range(LAYERS)])

    def __call__(self, noisy: jax.Array, time: jax.Array, text: jax.Array, lengths: jax.Array) -> jax.Array:
        x = self.inward(to_patches(noisy)) + self.place[...][None]
        angle = time[:, None] * 1000.0 ** (jnp.arange(DIM // 2, dtype=jnp.float32) / (DIM // 2))[None]
        level = self.level(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1))
        read = self.reader(nnx.gelu(self.letters(text) + self.letter_place[: text.shape[1]][None]))
        for block in self.blocks:
            x = block(x, level, read, lengths)
        return from_patches(self.outward(x))
