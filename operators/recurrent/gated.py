"""Tokens of linear attention behind their gates, and what their values themselves count in the outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .kernel.gates import Gates, Ungated, normalised, step_of, strength_of

__all__ = ["by_heads", "gated", "skipped", "wide"]


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def by_heads(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 1)


def gated(
    given: Ungated, gates: Gates, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(query, key, value, log decay [batch, tokens, heads, dim or 1], beta), where tokens that don't count change nothing. valid:
    bool [batch, tokens], None if all count; values of others are 0."""
    query, key, value, beta = given.query, given.key, given.value, given.beta
    if gates.normalise_eps is not None:
        query, key = (normalised(x, gates.normalise_eps).astype(x.dtype) for x in (query, key))
    step = step_of(gates, given.decay, None if given.bias is None else given.bias[None, None])
    decay = step if given.rate is None else given.rate.reshape(1, 1, -1, *[1] * (step.ndim - 3)) * step
    decay = decay[..., None] if decay.ndim == 3 else decay
    strength = None if beta is None else strength_of(gates, beta)
    if valid is not None:
        decay = jnp.where(valid[..., None, None], decay, 0)
        step = jnp.where(valid[..., None], step, 0) if gates.steps else step
        strength = None if strength is None else jnp.where(valid[..., None], strength, 0)
    if gates.steps:  # of Mamba, whose factors are in float32
        query, key, value = wide(query), wide(key), step[..., None] * wide(value)
    return query, key, value, decay, strength


def skipped(given: Ungated, outputs: jax.Array) -> jax.Array:
    """Outputs [batch, tokens, heads, value_dim] with what the values themselves count."""
    return outputs if given.skip is None else outputs + wide(given.skip)[None, None, :, None] * wide(given.value)
