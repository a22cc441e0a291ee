"""The two forms of latent attention, on arrays, and its queries: what the attention between the projections gets, and what its
output becomes.

expanded: keys and values for each head. absorbed: one key head, the latent and the key of the rotary part; its values are the
latents, and query and output are projected instead: q_nope . (W_UK c) + q_rope . k = (W_UK^T q_nope) . c + q_rope . k.

A query that is made of a latent q is q_nope = W_UQ q and the rotated q_rope = R W_QR q. Folded, (W_UK^T W_UQ) q is one product.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..kernels.precision import exact

__all__ = ["absorbed_inputs", "absorbed_output", "absorbed_query", "expanded_inputs", "folded_query", "made_query"]


_with_layout = functools.partial(jax.jit, static_argnames="layout")


@_with_layout
def expanded_inputs(
    q_nope: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope_key: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    layout: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value, in the layout."""
    batch = layout.replace("t", "").replace("h", "").replace("d", "")
    heads_first = layout.index("h") < layout.index("t")
    out = batch + ("htd" if heads_first else "thd")
    key = _product(f"{batch}tc,chd->{out}", latent, w_uk)
    value = _product(f"{batch}tc,chd->{out}", latent, w_uv)
    shared = jnp.expand_dims(rope_key, layout.index("h"))
    shared = jnp.broadcast_to(shared, (*key.shape[:-1], rope_key.shape[-1]))
    return jnp.concatenate([q_nope, q_rope], -1), jnp.concatenate([key, shared], -1), value


@_with_layout
def absorbed_inputs(
    query: jax.Array, latent: jax.Array, rope_key: jax.Array, layout: str
) -> tuple[jax.Array, jax.Array]:
    """The absorbed query, and one key head whose values are the first columns of its keys."""
    key = jnp.concatenate([latent, rope_key], -1)
    axis = layout.index("h")
    return query, jnp.expand_dims(key, axis)


@_with_layout
def absorbed_query(q_nope: jax.Array, q_rope: jax.Array, w_uk: jax.Array, layout: str) -> jax.Array:
    """The query that latents and their rotary keys are multiplied with."""
    query = _product(f"{layout},chd->{layout.replace('d', 'c')}", q_nope, w_uk)
    return jnp.concatenate([query, q_rope], -1)


@_with_layout
def absorbed_output(attended: jax.Array, w_uv: jax.Array, layout: str) -> jax.Array:
    """The values of each head, from its sum of latents."""
    return _product(f"{layout.replace('d', 'c')},chd->{layout}", attended, w_uv)


@functools.partial(jax.jit, static_argnames=("pairs", "layout"))
def made_query(
    query_latent: jax.Array, w_uq: jax.Array, q_cos: jax.Array, q_sin: jax.Array, pairs: str, layout: str
) -> tuple[jax.Array, jax.Array]:
    """(q_nope, q_rope) of latents of queries; the rotary part, the last numbers of w_uq, is rotated."""
    made = _product(f"{_flat(layout)},lhd->{layout}", query_latent, w_uq)
    nope = made.shape[-1] - 2 * q_cos.shape[-1]
    return made[..., :nope], _rotated(made[..., nope:], q_cos, q_sin, pairs, layout)


@functools.partial(jax.jit, static_argnames=("pairs", "layout"))
def folded_query(
    query_latent: jax.Array,
    w_uq: jax.Array,
    q_cos: jax.Array,
    q_sin: jax.Array,
    w_uk: jax.Array,
    pairs: str,
    layout: str,
) -> jax.Array:
    """`absorbed_query` of `made_query`, by the product of both projections."""
    nope = w_uk.shape[-1]
    weight = jnp.einsum("lhd,chd->lhc", w_uq[..., :nope].astype(w_uk.dtype), w_uk, precision=exact(w_uk.dtype))
    query = _product(f"{_flat(layout)},lhc->{layout.replace('d', 'c')}", query_latent, weight)
    rope = _product(f"{_flat(layout)},lhd->{layout}", query_latent, w_uq[..., nope:])
    return jnp.concatenate([query, _rotated(rope, q_cos, q_sin, pairs, layout)], -1)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: str, layout: str) -> jax.Array:
    """x with each of its pairs of numbers rotated, in float32; pairs stay where they are."""
    cos, sin = (
        jax.lax.stop_gradient(jnp.expand_dims(part.astype(jnp.float32), layout.index("h"))) for part in (cos, sin)
    )
    wide = x.astype(jnp.float32)
    if pairs == "interleaved":
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = jnp.stack(turned, -1).reshape(x.shape) if pairs == "interleaved" else jnp.concatenate(turned, -1)
    return joined.astype(x.dtype)


def _flat(layout: str) -> str:
    """The letters of an array of latents of queries, in a layout."""
    return layout.replace("h", "").replace("d", "l")


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b.astype(a.dtype), precision=exact(a.dtype))
