"""What the layers of hybrid models share: norms, rotary positions, a product with a weight, and experts. Plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Weights = dict[str, jax.Array]


def along(weight: jax.Array, x: jax.Array) -> jax.Array:
    """A weight of the last dimensions of x, with the number of dimensions of x."""
    return weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


def rms_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """x [..., dim] divided by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.float32(epsilon))


def projected(x: jax.Array, weights: Weights, name: str) -> jax.Array:
    """The linear layer `name` [out, in] of x [..., in]."""
    return x @ weights[f"{name}.weight"].T


def heads(x: jax.Array, dim: int) -> jax.Array:
    """[..., heads * dim] as [..., heads, dim]."""
    return x.reshape(*x.shape[:-1], -1, dim)


def rotary(x: jax.Array, positions: jax.Array, dim: int, base: float) -> jax.Array:
    """Rotate the first `dim` numbers of each head of x [..., tokens, heads, head_dim] by angles that grow with the positions
    [..., tokens]; a number's partner is dim / 2 after it."""
    frequency = jnp.asarray(base ** (-np.arange(0, dim, 2) / dim), jnp.float32)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency.reshape((1,) * (positions.ndim + 1) + (-1,))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second, rest = jnp.split(x, (dim // 2, dim), -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def routed(scores: jax.Array, choose_by: jax.Array, count: int) -> jax.Array:
    """Scores [..., experts] of the `count` experts for which `choose_by` is largest, divided by their sum; 0 for the others."""
    chosen = jax.lax.top_k(choose_by, count)[1]
    kept = scores * jax.nn.one_hot(chosen, scores.shape[-1], dtype=scores.dtype).sum(-2)
    return kept / kept.sum(-1, keepdims=True)


def experts(x: jax.Array, shares: jax.Array, up: jax.Array, down: jax.Array, activate: object) -> jax.Array:
    """Experts of x [..., hidden], each with its share [..., experts]. up [experts, inner, hidden], down [experts, hidden, inner].

    Every expert sees every token, which is right for a few small ones.
    """
    inner = activate(jnp.einsum("...h,eih->...ei", x, up))  # type: ignore[operator]
    return jnp.einsum("...ei,ehi,...e->...h", inner, down, shares)
