"""Linear attention with decay, with or without the delta rule: chunks of tokens, one state after the other.

In a chunk, with S the state before it, G_i the sum of log decays up to token i, and D_ij the decay between tokens:

    A_ij = q_i D_ij k_j for j <= i,   P_ij = k_i D_ij k_j for j < i
    U = beta (I + P beta)^-1 (V - (K e^G) S), or U = V without the delta rule
    O = scale ((Q e^G) S + A U),   S' = e^(G_end) S + (K e^(G_end - G))^T U

With a gradient, each chunk keeps the state before it, and what takes longest to make again; linear_backward.py goes through the
chunks in reverse.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...kernels.derivatives import reverse_only
from ...kernels.precision import exact
from ...kernels.varying import alike
from .decays import Kept, decayed_products, from_start, kept_of, to_end
from .linear_backward import Chunk, chunk_gradients
from .unit_triangular import unit_inverse

__all__ = ["LINEAR", "chunked"]

LINEAR = "linear attention in chunks"
"""What errors call it."""


class _Chunk(NamedTuple):
    """The tokens of a chunk, as arrays [batch * tokens, heads * ...]: a chunk's heads are moved before its tokens in a cache, as
    those of all tokens would not be. query, key of key_heads; value, log_decay and beta of heads, beta None without the delta
    rule; document [batch, tokens] or None: which one a token is of, counted from that of the initial state, 0; before [batch]:
    that of the token before the chunk."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None
    document: jax.Array | None
    before: jax.Array | None


class _Kept(NamedTuple):
    """What a chunk keeps for its gradient: the state before it; of the delta rule the inverse, and of each value what its key
    hadn't seen: the updates before they are multiplied with beta; of decays by channel, the products A and P."""

    state: jax.Array
    inverse: jax.Array | None
    unseen: jax.Array | None
    products: tuple[jax.Array, ...] | None


class _How(NamedTuple):
    """What is static of a call. dtype: of the outputs."""

    scale: float
    dtype: np.dtype[Any]

    @property
    def precision(self) -> lax.Precision:
        """That of products with what was given in this dtype."""
        return exact(self.dtype)


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

    documents = before = None
    if document is not None:
        padded = jnp.pad(document, [(0, 0), (0, chunks * size - tokens)], mode="edge")
        documents = jnp.moveaxis(padded.reshape(batch, chunks, size), 1, 0)
        before = jnp.pad(documents[:-1, :, -1], ((1, 0), (0, 0)))
    blocks = _Chunk(
        split(query),
        split(key),
        split(value),
        split(log_decay),
        None if beta is None else split(beta),
        documents,
        before,
    )
    state = jnp.zeros((batch, heads, dim, value_dim), jnp.float32)
    if initial_state is not None:
        state = initial_state.astype(jnp.float32)
    state = state.reshape(batch, key_heads, group, dim, value_dim)
    blocks, state = reverse_only(alike((blocks, state)), LINEAR, "")
    outputs, state = _chunks(_How(scale, np.dtype(out_dtype)), blocks, state)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(how: _How, blocks: _Chunk, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(outputs [chunks, batch * tokens, heads * value_dim], the state after the last chunk)."""
    state, (outputs, _) = lax.scan(functools.partial(_chunk, how, keeps=False), state, blocks)
    return outputs, state


def _forward(how: _How, blocks: _Chunk, state: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
    state, (outputs, kept) = lax.scan(functools.partial(_chunk, how, keeps=True), state, blocks)
    return (outputs, state), (blocks, kept)


def _backward(how: _How, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[_Chunk, jax.Array]:
    blocks, kept = residuals
    blocks, kept, (d_outputs, d_state) = alike((blocks, kept, cotangents))
    step = functools.partial(_gradients, how)
    d_state, found = lax.scan(step, d_state, (blocks, kept, d_outputs), reverse=True)
    like = blocks._replace(document=None, before=None)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), found, like), d_state


_chunks.defvjp(_forward, _backward)


def _of_heads(x: jax.Array, batch: int, key_heads: int, group: int) -> jax.Array:
    """[batch * tokens, heads * ...] -> [batch, key_heads, heads of each, tokens, ...] in float32."""
    by_token = x.reshape(batch, -1, key_heads, group, x.shape[1] // (key_heads * group))
    return jnp.moveaxis(by_token, 1, 3).astype(jnp.float32)


def _documents(blocks: _Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(whether two tokens are of the same document [batch, 1, 1, tokens, tokens]; as numbers, whether the state before, and that
    after, are of a token's [batch, 1, 1, tokens, 1])."""
    assert blocks.document is not None
    assert blocks.before is not None
    at = jnp.expand_dims(blocks.document, (1, 2))  # over heads
    carried = (at == blocks.before[:, None, None, None]).astype(jnp.float32)[..., None]
    last = (at == at[..., -1:]).astype(jnp.float32)[..., None]
    return at[..., :, None] == at[..., None, :], carried, last


def _chunk(how: _How, state: jax.Array, blocks: _Chunk, *, keeps: bool) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    batch, key_heads, group = state.shape[:3]
    of_heads = functools.partial(_of_heads, batch=batch, key_heads=key_heads)
    query, key = of_heads(blocks.query, group=1), of_heads(blocks.key, group=1)
    value, log_decay = of_heads(blocks.value, group=group), of_heads(blocks.log_decay, group=group)
    product, same = functools.partial(jnp.einsum, precision=how.precision), None
    started, ended = jnp.exp(from_start(log_decay)), jnp.exp(to_end(log_decay))
    kept = kept_of(jnp.sum(log_decay, -2)[..., None])  # of the state's channels, over the whole chunk
    if blocks.document is not None:
        same, carried, last = _documents(blocks)
        started, ended, kept = started * carried, ended * last, kept.times(carried[..., -1:, :])

    rows = (query,) if blocks.beta is None else (query, key)  # products with the same factor are made at once
    weights = decayed_products(rows, key, log_decay, how.precision)
    weights = weights if same is None else [jnp.where(same, x, 0) for x in weights]
    # A decay for a head multiplies what is read, which takes no array of its own.
    channels = log_decay.shape[-1] > 1
    factors = jnp.concatenate([x * started for x in rows] if channels else rows, -2)
    both = jnp.split(product("...ik,...kv->...iv", factors, state), len(rows), -2)
    read = both if channels else [x * started for x in both]
    update, inverse, unseen = value, None, None
    if blocks.beta is not None:
        beta = of_heads(blocks.beta, group=group)
        below = np.expand_dims(np.tri(key.shape[-2], k=-1, dtype=np.float32), (0, 1, 2))
        inverse = unit_inverse(weights[1] * below * jnp.swapaxes(beta, -1, -2))
        unseen = product("...ij,...jv->...iv", inverse, value - read[1])
        update = beta * unseen
    outputs = how.scale * (read[0] + product("...ij,...jv->...iv", weights[0], update))
    after = kept.of(state, product("...ik,...iv->...kv", key * ended, update))
    outputs = jnp.moveaxis(outputs, 3, 1).reshape(blocks.value.shape).astype(how.dtype)
    return after, (outputs, _Kept(state, inverse, unseen, tuple(weights) if channels else None) if keeps else None)


def _gradients(how: _How, d_after: jax.Array, of_chunk: tuple[_Chunk, _Kept, jax.Array]) -> tuple[jax.Array, _Chunk]:
    blocks, kept, d_outputs = of_chunk
    batch, key_heads, group = kept.state.shape[:3]

    def of_heads(x: jax.Array, group: int = group) -> jax.Array:
        """[batch * tokens, heads * ...] -> [n, tokens, ...], a key head's as often as heads have it."""
        return every(_of_heads(x, batch, key_heads, group))

    def every(x: jax.Array) -> jax.Array:
        """[batch, key_heads or 1, heads of each or 1, ...] -> [n, ...]."""
        return jnp.broadcast_to(x, (batch, key_heads, group, *x.shape[3:])).reshape(-1, *x.shape[3:])

    same = carried = last = None
    if blocks.document is not None:
        same, carried, last = map(every, _documents(blocks))
    chunk = Chunk(
        of_heads(blocks.query, 1),
        of_heads(blocks.key, 1),
        of_heads(blocks.value) if kept.unseen is None else every(kept.unseen),
        of_heads(blocks.log_decay),
        every(kept.state),
        jax.tree.map(of_heads, blocks.beta),
        jax.tree.map(every, kept.inverse),
        carried,
        last,
        same,
        jax.tree.map(every, kept.products),
    )
    found = chunk_gradients(chunk, of_heads(d_outputs), every(d_after), scale=how.scale, precision=how.precision)

    def back(x: jax.Array, like: jax.Array, shared: bool = False) -> jax.Array:
        """[n, tokens, ...] -> [batch, tokens, key_heads, heads of each, ...], which XLA for CPUs writes into a stack of chunks
        faster than rows of all heads; shared: the sum over the heads of a key head."""
        x = x.reshape(batch, key_heads, group, *x.shape[1:])
        x = jnp.sum(x, 2, keepdims=True) if shared and group > 1 else x
        return jnp.moveaxis(x, 3, 1).astype(like.dtype)

    d_blocks = _Chunk(
        back(found.query, blocks.query, True),
        back(found.key, blocks.key, True),
        back(found.value, blocks.value),
        back(found.log_decay, blocks.log_decay),
        jax.tree.map(back, found.beta, blocks.beta),
        None,
        None,
    )
    return found.state.reshape(d_after.shape), d_blocks
