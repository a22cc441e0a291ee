"""How to read pages of any layout by id."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ....page_layouts import LAYOUTS, PageShape
from ...vanilla.kernel.cpu_tuning import as_bits, from_bits

__all__ = [
    "fetch",
    "fetch_joint_heads",
    "page_shape",
]


def page_shape(
    layout: str, key: jax.Array, value: jax.Array | None, dim: int, value_dim: int | None = None
) -> PageShape:
    """Read the sizes from the arrays; `dim` is the query's. If one array holds keys and values it is `key`, and `value` is None.

    `value_dim`: needed if padded rows don't determine it; None: the query's.
    """
    return LAYOUTS[layout].sizes(key, value, dim, value_dim)


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
    stored = as_bits(pages, platform) if dtype == pages.dtype else pages
    form = LAYOUTS[layout]
    whole = form.viewed(stored).at[form.index(ids, half, first, dim)].get(mode="promise_in_bounds")
    at = ids.ndim - 1
    if form.heads_first:
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
