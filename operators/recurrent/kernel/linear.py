"""Linear attention with decay, with or without the delta rule: chunks of tokens, one state after the other.

In a chunk, with S the state before it, G_i the sum of log decays up to token i, and D_ij the decay between tokens:

    A_ij = q_i D_ij k_j for j <= i,   P_ij = k_i D_ij k_j for j < i
    U = (I + beta P)^-1 beta (V - (K e^G) S), or U = V without the delta rule
    O = scale ((Q e^G) S + A U),   S' = e^(G_end) S + (K e^(G_end - G))^T U
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ...kernels.precision import exact
from ...kernels.varying import alike
from .decays import Kept, decayed_products, from_start, kept_of, scaled, to_end
from .unit_triangular import unit_inverse

__all__ = ["chunked"]

_KEPT = "attnops_recurrent_chunk"  # what the backward pass doesn't compute again


class _Chunk(NamedTuple):
    """The tokens of a chunk, as arrays [batch * tokens, heads * ...]: a chunk's heads are moved before its tokens in a cache, as
    those of all tokens would not be. query, key of key_heads; value, log_decay and beta of heads, beta None without the delta
    rule; document [batch, tokens] or None: which one a token is of, counted from that of the initial state, 0."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None
    document: jax.Array | None


def chunked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    initial_state: jax.Array | None,
    document: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """(outputs [batch, heads, tokens, value_dim] in the query's dtype, final state [batch, heads, dim, value_dim] in float32).

    query, key [batch, key_heads, tokens, dim]; value [batch, heads, tokens, value_dim]; log_decay [batch, heads, tokens, dim or
    1]; beta [batch, heads, tokens] for the delta rule, None without it; document int32 [batch, tokens], which grows by one at
    each document's first token: the initial state is that of the tokens in document 0, and the others' is zero. chunk_size: a
    power of two."""
    batch, key_heads, tokens, dim = query.shape
    heads, value_dim = value.shape[1], value.shape[3]
    group, out_dtype = heads // key_heads, query.dtype
    if tokens == 1:
        return _one_token(query, key, value, log_decay, beta, initial_state, document, scale)
    size = min(chunk_size, 1 << max(tokens - 1, 0).bit_length())
    chunks = -(-tokens // size)

    def split(x: jax.Array) -> jax.Array:
        """[batch, heads, tokens, ...] -> [chunks, batch * size, heads * ...]; what is added changes nothing."""
        padded = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * size - tokens), *[(0, 0)] * (x.ndim - 3)])
        return _exchanged(jnp.moveaxis(padded, 1, 2).reshape(batch, chunks, size, -1)).reshape(chunks, batch * size, -1)

    documents = None
    if document is not None:
        padded = jnp.pad(document, [(0, 0), (0, chunks * size - tokens)], mode="edge")
        documents = jnp.moveaxis(padded.reshape(batch, chunks, size), 1, 0)
    blocks = _Chunk(
        split(query),
        split(key),
        split(value),
        split(log_decay),
        None if beta is None else split(beta),
        documents,
    )
    state = jnp.zeros((batch, heads, dim, value_dim), jnp.float32)
    if initial_state is not None:
        state = initial_state.astype(jnp.float32)
    state = state.reshape(batch, key_heads, group, dim, value_dim)
    step = functools.partial(_chunk, scale=scale, precision=exact(out_dtype), out_dtype=out_dtype)
    policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
    first = None if documents is None else jnp.zeros((batch,), documents.dtype)
    state, first, blocks = alike((state, first, blocks))
    (state, _), outputs = lax.scan(jax.checkpoint(step, policy=policy, prevent_cse=False), (state, first), blocks)
    outputs = _exchanged(outputs.reshape(chunks, batch, size, -1)).reshape(batch, chunks * size, heads, value_dim)
    return jnp.moveaxis(outputs[:, :tokens], 2, 1), state.reshape(batch, heads, dim, value_dim)


def _exchanged(x: jax.Array) -> jax.Array:
    """With the first two axes exchanged: as a reshape where one has size 1, as XLA for CPUs copies to transpose."""
    return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]) if 1 in x.shape[:2] else jnp.swapaxes(x, 0, 1)


def _one_token(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    initial_state: jax.Array | None,
    document: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """`chunked` of one token: the state is read once for the query and, by the delta rule, the key, and once where it is
    written."""
    group, out_dtype = value.shape[1] // query.shape[1], query.dtype
    query, key = (jnp.repeat(x.astype(jnp.float32), group, 1) for x in (query, key))  # [batch, heads, 1, dim]
    value, kept = value.astype(jnp.float32), kept_of(log_decay.astype(jnp.float32))
    if initial_state is None:
        state = jnp.swapaxes(key, 2, 3) * (value if beta is None else value * beta.astype(jnp.float32)[..., None])
        outputs = scale * jnp.einsum("bhik,bhkv->bhiv", query, state, precision=lax.Precision.HIGHEST)
        return outputs.astype(out_dtype), state
    if document is not None:
        kept = kept.times((document == 0).astype(jnp.float32)[:, None, :, None])
    before, of_rows = initial_state.astype(jnp.float32), Kept(*(jnp.swapaxes(x, 2, 3) for x in kept))
    product = functools.partial(jnp.einsum, "bhik,bhkv->bhiv", precision=lax.Precision.HIGHEST)
    if beta is None:
        read = product(query * kept.whole, before)
        # Always the value, as no decay is below 0. The condition makes the new state follow from the read: XLA then writes it
        # in place, after the read.
        update = jnp.where(jnp.abs(read) < -kept.whole[..., :1], read, value)
    else:
        both = product(jnp.concatenate([query, key], 2) * kept.whole, before)
        read, update = both[:, :, :1], beta.astype(jnp.float32)[..., None] * (value - both[:, :, 1:])
    # A product, as XLA for CPUs takes longer to sum up so few numbers.
    own = jnp.einsum("bhik,bhjk->bhij", query, key, precision=lax.Precision.HIGHEST)
    outputs = scale * (read + own * update)
    state = of_rows.of(before, jnp.swapaxes(key, 2, 3) * update)
    return outputs.astype(out_dtype), state


def _chunk(
    carry: tuple[jax.Array, Any], blocks: _Chunk, *, scale: float, precision: lax.Precision, out_dtype: Any
) -> tuple[tuple[jax.Array, Any], jax.Array]:
    state, before = carry
    batch, key_heads, group = state.shape[:3]

    def of_heads(x: jax.Array, group: int) -> jax.Array:
        """[batch * tokens, heads * ...] -> [batch, key_heads, heads of each, tokens, ...] in float32."""
        by_token = x.reshape(batch, -1, key_heads, group, x.shape[1] // (key_heads * group))
        return jnp.moveaxis(by_token, 1, 3).astype(jnp.float32)

    query, key = of_heads(blocks.query, 1), of_heads(blocks.key, 1)
    value, log_decay = of_heads(blocks.value, group), of_heads(blocks.log_decay, group)
    product = functools.partial(jnp.einsum, precision=precision)
    document, same = blocks.document, None
    started, ended = jnp.exp(from_start(log_decay)), jnp.exp(to_end(log_decay))
    kept = kept_of(jnp.sum(log_decay, -2)[..., None])  # of the state's channels, over the whole chunk
    if document is not None:
        at = jnp.expand_dims(document, (1, 2))  # over heads
        same = at[..., :, None] == at[..., None, :]
        # Whether the state before, and that after, are of a token's document.
        carried = (at == before[:, None, None, None]).astype(jnp.float32)[..., None]
        last = (at == at[..., -1:]).astype(jnp.float32)[..., None]
        started, ended, kept = started * carried, ended * last, kept.times(carried[..., -1:, :])

    rows = (query,) if blocks.beta is None else (query, key)  # products with the same factor are made at once
    weights = decayed_products(rows, key, log_decay, precision)
    weights = weights if same is None else [jnp.where(same, x, 0) for x in weights]
    # A decay for a head multiplies what is read, which takes no array of its own.
    channels = log_decay.shape[-1] > 1
    factors = jnp.concatenate([x * started for x in rows] if channels else rows, -2)
    both = jnp.split(product("...ik,...kv->...iv", factors, state), len(rows), -2)
    read = both if channels else [scaled(x, started) for x in both]
    update = value
    if blocks.beta is not None:
        beta = of_heads(blocks.beta, group)
        strict = np.tri(key.shape[-2], k=-1, dtype=np.float32)
        inverse = checkpoint_name(
            unit_inverse(scaled(weights[1] * jnp.expand_dims(strict, range(weights[1].ndim - 2)), beta)), _KEPT
        )
        update = checkpoint_name(product("...ij,...jv->...iv", inverse, scaled(value - read[1], beta)), _KEPT)
    outputs = scale * (read[0] + product("...ij,...jv->...iv", weights[0], update))
    kept_keys = key * ended if channels else scaled(jnp.broadcast_to(key, (*ended.shape[:-1], key.shape[-1])), ended)
    added = product("...ik,...iv->...kv", kept_keys, update)
    state = scaled(state, kept.most) + (scaled(state, kept.rest) + added) if channels else kept.of(state, added)
    outputs = jnp.moveaxis(outputs, 3, 1).reshape(blocks.value.shape).astype(out_dtype)
    return (state, None if document is None else document[:, -1]), outputs
