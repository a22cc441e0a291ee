"""Mamba-1: a decay for each channel and each number of its state, a token at a time in chunks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ...kernels.varying import alike

__all__ = ["selective_scan"]


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    rate: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial_state: jax.Array | None,
    document: jax.Array | None,
    *,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """(outputs [batch, tokens, channels], final state [batch, channels, state_dim]) in float32.

    h = exp(dt * rate) h + dt x b, y = h . c. x, dt [batch, tokens, channels]; rate [channels, state_dim], negative; b, c [batch,
    tokens, state_dim]; document int32 [batch, tokens], see `linear.chunked`.
    """
    batch, tokens, channels = x.shape
    size = min(chunk_size, tokens)
    chunks = -(-tokens // size)
    wide = [value.astype(jnp.float32) for value in (x, dt, b, c)]
    # A token that is added has dt = 0, which leaves the state as it is.
    padded = [jnp.pad(value, ((0, 0), (0, chunks * size - tokens), (0, 0))) for value in wide]
    blocks = [jnp.moveaxis(v.reshape(batch, chunks, size, -1), (1, 2), (0, 1)) for v in padded]
    starts = None
    if document is not None:
        padded_document = jnp.pad(document, ((0, 0), (0, chunks * size - tokens)), mode="edge")
        before = jnp.pad(padded_document, ((0, 0), (1, 0)))[:, :-1]
        starts = jnp.moveaxis((padded_document != before).reshape(batch, chunks, size), (1, 2), (0, 1))
    rate = rate.astype(jnp.float32)

    def token(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c, *start = at
        if start:
            state = jnp.where(start[0][:, None, None], 0, state)
        state = jnp.exp(dt[..., None] * rate[None]) * state + (dt * x)[..., None] * b[:, None]
        return state, jnp.einsum("bcn,bn->bc", state, c, precision=lax.Precision.HIGHEST)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return lax.scan(token, state, at)

    state = jnp.zeros((batch, channels, rate.shape[1]), jnp.float32)
    if initial_state is not None:
        state = initial_state.astype(jnp.float32)
    state, rate, blocks, starts = alike((state, rate, blocks, starts))
    if tokens == 1:
        state, outputs = token(state, (*(x[0, 0] for x in blocks), *(() if starts is None else (starts[0, 0],))))
        return outputs[:, None], state
    state, outputs = lax.scan(chunk, state, (*blocks, *(() if starts is None else (starts,))))
    outputs = jnp.moveaxis(outputs, (0, 1), (1, 2)).reshape(batch, chunks * size, channels)
    return outputs[:, :tokens], state
