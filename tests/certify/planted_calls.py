"""Functions over pages, of latents and of indexers that are right, and others that are wrong in one thing each."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from planted import half_gradient


def _softmax(x, see, v, sinks=None, wrong=""):
    """Of logits [heads, q, kv] to values [kv, heads, dim]: the output and the log-sum-exp, 0 and -inf for a row without keys."""
    x = jnp.where(see, x, -jnp.inf)
    top = jnp.maximum(x.max(-1, keepdims=True), -1e30)
    top = jnp.zeros_like(top) if wrong == "maximum" else top
    top = top if sinks is None else jnp.maximum(top, sinks[:, None, None])
    e = jnp.exp(x - top)
    total = e.sum(-1, keepdims=True) + (0.0 if sinks is None else jnp.exp(sinks[:, None, None] - top))
    out = jnp.einsum("hij,jhd->ihd", e / jnp.where(total > 0, total, 1.0), v)
    return out, jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)) + top, -jnp.inf)[..., 0]


def _shown(i, j, causal, window, wrong):
    see = (j <= i) if causal else jnp.ones((i + j).shape, bool)
    if window is not None:
        left, right = window
        see = see & (j >= i - left - int(wrong == "window"))
        see = see if right is None else see & (j <= i + right)
    return see


def over_pages(
    q, key_pages, value_pages, table, kv_lens, cu_q_lens, *, causal=True, window=None, scale=None, sinks=None, selected=None,
    wrong="",
):  # fmt: skip
    """A token at a time, whose row has its keys in the pages of the table."""
    tokens, dtype = jnp.arange(q.shape[0]), q.dtype
    row = jnp.searchsorted(cu_q_lens, tokens, side="right") - 1
    there, row = row < len(kv_lens), jnp.minimum(row, len(kv_lens) - 1)
    q = q if wrong == "tokens of nobody" else jnp.where(there[:, None, None], q, 0)
    scale = q.shape[2] ** -0.5 if scale is None or wrong == "scale" else scale
    if wrong == "in a mesh" and jax.sharding.get_abstract_mesh().manual_axes:
        scale = 2 * scale

    def one(token, row):
        ids = jnp.sort(table[row]) if wrong == "order of pages" else table[row]
        k, v = (jnp.reshape(x[ids], (-1, *x.shape[2:])).astype(jnp.float32) for x in (key_pages, value_pages))
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, 1) for x in (k, v))
        length = kv_lens[row] + int(wrong == "length")
        i = length - cu_q_lens[row + 1] + token
        i = token - cu_q_lens[row] if wrong == "position" else i
        j = jnp.arange(k.shape[0])
        see = (j < length) & _shown(i, j, causal, window, wrong)
        see = see if selected is None else see & (jnp.asarray(selected)[token][:, None] == j[None]).any(0)
        x = jnp.einsum("hd,jhd->hj", q[token].astype(jnp.float32), k)[:, None] * scale
        out, lse = _softmax(x, see, v, None if wrong == "sinks" else sinks, wrong)
        return out[0], lse[:, 0]

    out, lse = jax.vmap(one)(tokens, row)
    out, lse = jnp.where(there[:, None, None], out, out * 0), jnp.where(there[:, None], lse, -jnp.inf)
    return out.astype(dtype), lse


def latent(
    q_nope, q_rope, latent, rope_key, w_uk, w_uv, *, causal=True, offset=0, window=None, scale=None, lengths=None, wrong=""
):  # fmt: skip
    """With the weights absorbed."""
    dtype = latent.dtype
    w_uk = half_gradient(w_uk) if wrong == "gradient" else w_uk
    q_nope, q_rope, latent, rope_key, w_uk, w_uv = (
        x.astype(jnp.float32) for x in (q_nope, q_rope, latent, rope_key, w_uk, w_uv)
    )
    width = q_nope.shape[-1] + (0 if wrong == "default scale" else q_rope.shape[-1])
    scale = width**-0.5 if scale is None else scale
    x = jnp.einsum("bihn,chn,bjc->bhij", q_nope, w_uk, latent)
    x = x if wrong == "rotary keys" else x + jnp.einsum("bihr,bjr->bhij", q_rope, rope_key)
    i = jnp.arange(q_nope.shape[1], dtype=jnp.int32)[None, :, None] + jnp.asarray(offset, jnp.int32).reshape(-1, 1, 1)
    j = jnp.arange(latent.shape[1], dtype=jnp.int32)[None, None]
    see = jnp.broadcast_to(_shown(i, j, causal, window, wrong), (latent.shape[0], i.shape[1], j.shape[2]))
    see = see if lengths is None else see & (j < lengths[:, None, None])
    values = jnp.einsum("bjc,chv->bjhv", latent, w_uv)
    return jax.vmap(lambda x, see, v: _softmax(x * scale, see, v, wrong=wrong)[0])(x, see, values).astype(dtype)


class Selected(NamedTuple):
    """What an indexer returns."""

    positions: jax.Array
    counts: jax.Array


def indexer(q, k, w, top_k, *, causal=True, offset=0, window=None, lengths=None, scale=None, wrong=""):
    """Sorts the scores of every query."""
    q, k, w = (x.astype(jnp.float32) for x in (q, k, w))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    x = jnp.einsum("bihd,bjd->bihj", q, k) * scale
    score = (w[..., None] * (x if wrong == "relu" else jnp.maximum(x, 0))).sum(2)
    offset = jnp.asarray(offset, jnp.int32).reshape(-1, 1, 1)
    i = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :, None] + offset
    j = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
    see = jnp.broadcast_to(_shown(i, j, causal, window, wrong), score.shape)
    see = see if lengths is None else see & (j < lengths[:, None, None])
    order = jnp.argsort(jnp.where(see, -score, jnp.inf), -1, stable=True)
    if wrong == "ties":
        order = k.shape[1] - 1 - jnp.argsort(jnp.where(see, -score, jnp.inf)[..., ::-1], -1, stable=True)
    counts = jnp.minimum(see.sum(-1), top_k).astype(jnp.int32)
    order = jnp.pad(order, ((0, 0), (0, 0), (0, max(0, top_k - k.shape[1]))))[..., :top_k]
    used = jnp.arange(top_k, dtype=jnp.int32)[None, None] < counts[..., None]
    positions = jnp.sort(jnp.where(used, order, 2**30), -1)
    positions = jnp.where(used, positions, -1)
    return Selected(positions, counts + int(wrong == "counts"))


def _wrong(function, what):
    return functools.partial(function, wrong=what)


pages_window = _wrong(over_pages, "window")
pages_scale = _wrong(over_pages, "scale")
pages_order = _wrong(over_pages, "order of pages")
pages_length = _wrong(over_pages, "length")
pages_position = _wrong(over_pages, "position")
pages_sinks = _wrong(over_pages, "sinks")
pages_of_nobody = _wrong(over_pages, "tokens of nobody")
pages_maximum = _wrong(over_pages, "maximum")
pages_in_a_mesh = _wrong(over_pages, "in a mesh")
latent_window = _wrong(latent, "window")
latent_scale = _wrong(latent, "default scale")
latent_rotary = _wrong(latent, "rotary keys")
latent_maximum = _wrong(latent, "maximum")
latent_gradient = _wrong(latent, "gradient")
indexer_relu = _wrong(indexer, "relu")
indexer_ties = _wrong(indexer, "ties")
indexer_window = _wrong(indexer, "window")
indexer_counts = _wrong(indexer, "counts")
