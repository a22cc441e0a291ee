"""The two forms of latent attention, on arrays: what the attention between the projections gets, and what its output becomes.

expanded: keys and values for each head. absorbed: one key head, the latent and the key of the rotary part; its values are the
latents, and query and output are projected instead: q_nope . (W_UK c) + q_rope . k = (W_UK^T q_nope) . c + q_rope . k.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..kernels.precision import exact

__all__ = ["absorbed_inputs", "absorbed_output", "absorbed_query", "expanded_inputs"]


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
    q_nope: jax.Array, q_rope: jax.Array, latent: jax.Array, rope_key: jax.Array, w_uk: jax.Array, layout: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, and one key head whose values are the first columns of its keys."""
    query = absorbed_query(q_nope, q_rope, w_uk, layout=layout)
    key = jnp.concatenate([latent, rope_key], -1)
    axis = layout.index("h")
    return query, jnp.expand_dims(key, axis), jnp.expand_dims(latent, axis)


@_with_layout
def absorbed_query(q_nope: jax.Array, q_rope: jax.Array, w_uk: jax.Array, layout: str) -> jax.Array:
    """The query that latents and their rotary keys are multiplied with."""
    query = _product(f"{layout},chd->{layout.replace('d', 'c')}", q_nope, w_uk)
    return jnp.concatenate([query, q_rope], -1)


@_with_layout
def absorbed_output(attended: jax.Array, w_uv: jax.Array, layout: str) -> jax.Array:
    """The values of each head, from its sum of latents."""
    return _product(f"{layout.replace('d', 'c')},chd->{layout}", attended, w_uv)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b.astype(a.dtype), precision=exact(a.dtype))
