"""Page layouts: the shape of a layer's page arrays, how to read pages by id, and where tokens go.

split        key and value [pages, page, kv_heads, dim] each
heads        key and value [pages, kv_heads, page, dim] each: a head's page is one tile
joined       both in one array [pages, kv_heads, page, lanes]: a key followed by its value, padded to 128 lanes
interleaved  both in one array [pages, page, 2 kv_heads, dim], keys and values alternating
packed       the same with heads in 32-bit words and dim in lanes of 128, [pages, page, 2 kv_heads / pack, pack, lanes]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .cpu_tuning import as_bits, from_bits

__all__ = [
    "HEADS_FIRST",
    "ONE_ARRAY",
    "PageShape",
    "fetch",
    "fetch_joint_heads",
    "joined",
    "page_shape",
    "places_of",
]

ONE_ARRAY = ("joined", "interleaved", "packed")
"""Layouts that hold keys and values in one array."""
HEADS_FIRST = ("heads", "joined")
"""Layouts in which a page's heads come before its tokens."""
_LANES = 128


class PageShape(NamedTuple):
    """Sizes of a layer's pages on this device."""

    pages: int
    page: int
    kv_heads: int
    dim: int
    value_dim: int


def page_shape(
    layout: str, key: jax.Array, value: jax.Array | None, dim: int, value_dim: int | None = None
) -> PageShape:
    """Read the sizes from the arrays; `dim` is the query's. If one array holds keys and values it is `key`, and `value` is None.

    `value_dim`: needed if padded rows don't determine it; None: the query's.
    """
    shape = key.shape
    if layout == "joined":
        return PageShape(shape[0], shape[2], shape[1], dim, value_dim or dim)
    if layout == "heads":
        return PageShape(shape[0], shape[2], shape[1], shape[3], shape[3] if value is None else value.shape[3])
    if layout in ONE_ARRAY:
        heads = shape[2] if layout == "interleaved" else shape[2] * shape[3]
        return PageShape(shape[0], shape[1], heads // 2, dim if layout == "packed" else shape[3], dim)
    pages, page, heads, size = shape
    return PageShape(pages, page, heads, size, size if value is None else value.shape[3])


def fetch(
    layout: str,
    pages: jax.Array,
    ids: jax.Array,
    platform: str,
    dtype: Any,
    half: int = 0,
    dim: int = 0,
    first: int = 0,
) -> Any:
    """Pages by ids [..., n], all of them in range: [..., kv heads, n * page, dim].

    If an array holds keys and values, `half` is 0 for keys and 1 for values; a joined row's begin at `first`. One gather
    transposes at the same time. The barrier keeps the view of a bfloat16 array as bits inside the loop: before it, it
    would copy the whole cache.
    """
    pages, ids = lax.optimization_barrier((pages, ids))
    given = as_bits(pages, platform) if dtype == pages.dtype else pages
    index: tuple[Any, ...] = (ids,)
    if layout == "joined":
        index = (ids, slice(None), slice(None), slice(first, first + dim))
    elif layout in ONE_ARRAY:
        given = given.reshape(*given.shape[:2], -1, 2, given.shape[-1])
        index = (ids, slice(None), slice(None), half)
    whole = given.at[index].get(mode="promise_in_bounds")
    at = ids.ndim - 1
    if layout in HEADS_FIRST:
        whole = whole.transpose(*range(at), at + 1, at, at + 2, at + 3)
    else:
        whole = whole.transpose(*range(at), at + 2, at, at + 1, at + 3)
    part = whole.reshape(*whole.shape[: at + 1], -1, whole.shape[-1])
    if dim and dim != part.shape[-1]:
        part = part[..., :dim]
    return (part if part.dtype == pages.dtype else from_bits(part, pages.dtype)).astype(dtype)


def fetch_joint_heads(pages: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
    """Pages of layout `split` by ids [..., n], all of them in range: [..., n * page, kv heads * dim], not transposed.

    XLA:CPU gathers whole rows up to twice as fast as parts of more dimensions.
    """
    pages, ids = lax.optimization_barrier((pages, ids))
    whole = pages.reshape(pages.shape[0], -1).at[ids].get(mode="promise_in_bounds")
    return whole.astype(dtype).reshape(*ids.shape[:-1], -1, pages.shape[2] * pages.shape[3])


def joined(layout: str, key: jax.Array, value: jax.Array) -> jax.Array:
    """Tokens' keys and values [tokens, kv_heads, dim], in the form of an array that holds both."""
    if layout == "joined":
        both = jnp.concatenate([key, value], axis=-1)
        return jnp.pad(both, ((0, 0), (0, 0), (0, -both.shape[-1] % _LANES)))
    tokens, heads, dim = key.shape
    both = jnp.stack([key, value], axis=2).reshape(tokens, 2 * heads, dim)
    if layout == "interleaved":
        return both
    pack = 4 // key.dtype.itemsize
    both = jnp.pad(both, ((0, 0), (0, 0), (0, -dim % _LANES)))
    return both.reshape(tokens, 2 * heads // pack, pack, -1)


def places_of(layout: str, page: jax.Array, row: jax.Array) -> tuple[Any, ...]:
    """The index of tokens in an array of pages, or of scales: the page's `row`."""
    return (page, slice(None), row) if layout in HEADS_FIRST else (page, row)
