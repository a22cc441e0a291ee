"""The gradient of a chunk of linear attention: products, in the names of linear.py.

Rows are those of the queries and, for the delta rule, of the keys below them. d(X) is the gradient of X, and R that of what rows
read from the state:

    d(U) = scale A^T d(O) + (K e^(G_end - G)) d(S'),   d(V) = ((I + P beta)^-1)^T beta d(U),   R = [scale d(O), -d(V)]
    d(A, P) = R U^T,   d(rows e^G) = R S^T,   d(K e^(G_end - G)) = U d(S')^T,   d(S) = e^(G_end) d(S') + (rows e^G)^T R
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .decay_gradients import decayed_gradients
from .decays import decayed_products, from_start, from_start_gradient, kept_of, to_end, to_end_gradient

__all__ = ["Chunk", "Gradients", "chunk_gradients"]


class Chunk(NamedTuple):
    """A chunk of n heads in float32. query, key [n, tokens, dim]; updates [n, tokens, value_dim], for the delta rule before they
    are multiplied with beta; log_decay [n, tokens, dim or 1]; state [n, dim, value_dim], that before the chunk.

    Of the delta rule: beta [n, tokens, 1], inverse [n, tokens, tokens]. Of documents: carried, last [n, tokens, 1] as numbers 0
    and 1, whether the state before, and that after, are of a token's; same, bool [n, tokens, tokens], whether two tokens are of
    one. products [n, tokens, tokens]: those of rows and keys with the decay between them, None if they are to be made again."""

    query: jax.Array
    key: jax.Array
    updates: jax.Array
    log_decay: jax.Array
    state: jax.Array
    beta: jax.Array | None = None
    inverse: jax.Array | None = None
    carried: jax.Array | None = None
    last: jax.Array | None = None
    same: jax.Array | None = None
    products: tuple[jax.Array, ...] | None = None


class Gradients(NamedTuple):
    """Of arrays with the shapes of a Chunk's; value as its updates."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None
    state: jax.Array


def chunk_gradients(
    chunk: Chunk, d_outputs: jax.Array, d_after: jax.Array, *, scale: float, precision: lax.Precision
) -> Gradients:
    """d_outputs [n, tokens, value_dim]; d_after: of the state after the chunk."""
    query, key, updates, log_decay, state, beta = chunk[:6]
    product = functools.partial(jnp.einsum, precision=precision)
    started, ended = jnp.exp(from_start(log_decay)), jnp.exp(to_end(log_decay))
    kept = kept_of(jnp.sum(log_decay, 1)[..., None])
    if chunk.carried is not None:
        assert chunk.last is not None
        started, ended = started * chunk.carried, ended * chunk.last
        kept = kept.times(chunk.carried[:, -1:])
    rows = (query,) if beta is None else (query, key)
    made = chunk.products or decayed_products(rows, key, log_decay, precision)
    counted = [np.tri(key.shape[1], k=-n, dtype=bool)[None] for n in range(len(rows))]
    counted = [x if chunk.same is None else x & chunk.same for x in counted]

    def only(products: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.where(which, x, 0) for which, x in zip(counted, products, strict=True)]

    made = only(made)
    d_read, ends = np.float32(scale) * d_outputs, key * ended
    d_value = product("nij,niv->njv", made[0], d_read) + product("nik,nkv->niv", ends, d_after)
    d_beta, update = None, updates
    if beta is not None:
        d_updates, update = d_value, beta * updates
        d_value = product("nij,niv->njv", chunk.inverse, beta * d_updates)
        d_read = jnp.concatenate([d_read, -d_value], 1)
    d_made = only(jnp.split(product("niv,njv->nij", d_read, updates), len(rows), 1))
    if beta is not None:
        # The updates' beta is that of the products' columns.
        d_beta = jnp.sum(d_updates * updates, 2) + jnp.sum(d_made[1] * made[1], 1)
        d_made = [x * jnp.swapaxes(beta, 1, 2) for x in d_made]
    begun = [x * started for x in rows]
    d_begun = jnp.split(product("niv,nkv->nik", d_read, state), len(rows), 1)
    d_ends = product("niv,nkv->nik", update, d_after)
    d_state = kept.of(d_after, product("nik,niv->nkv", jnp.concatenate(begun, 1), d_read))
    d_rows, d_key, d_decay = decayed_gradients(rows, key, log_decay, made, d_made, precision)
    d_rows = [x + d * started for x, d in zip(d_rows, d_begun, strict=True)]
    d_key = d_key + d_ends * ended
    d_key = d_key if beta is None else d_key + d_rows[1]
    # Of the sums of log decays that `started`, `ended` and `kept` are exponentials of.
    d_started = functools.reduce(jnp.add, (x * d for x, d in zip(begun, d_begun, strict=True)))
    d_ended, d_kept = ends * d_ends, kept.whole[..., 0] * jnp.sum(d_after * state, 2)
    if log_decay.shape[2] == 1:
        d_started, d_ended, d_kept = (jnp.sum(x, -1, keepdims=True) for x in (d_started, d_ended, d_kept))
    d_decay = d_decay + from_start_gradient(d_started) + to_end_gradient(d_ended) + d_kept[:, None]
    d_beta = None if d_beta is None else d_beta[..., None]
    return Gradients(d_rows[0], d_key, d_value, d_decay, d_beta, d_state)
