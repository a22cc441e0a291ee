"""The score of an indexer: the sum over its heads of weight * relu(scale * query . key).

Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), equation 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ....errors import InputError, InputTypeError, a_type
from ...kernels.default_promotion import wider
from ...kernels.precision import exact

__all__ = ["check_index", "head_scores", "index_scores", "product_dtype"]


def check_index(
    index_query: Shaped[Array, "batch q_len index_heads dim"],
    index_key: Shaped[Array, "batch kv_len dim"],
    weights: Shaped[Array, "batch q_len index_heads"],
    key_scale: Shaped[Array, "batch kv_len"] | None = None,
) -> None:
    """Errors: InputError for shapes that don't fit together, InputTypeError for what isn't an array of numbers."""
    arrays = {"index_query": index_query, "index_key": index_key, "weights": weights, "key_scale": key_scale}
    for name, x in arrays.items():
        if x is None and name == "key_scale":
            continue
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise InputTypeError(f"{name} is {a_type(x)}; wanted an array.")
    if index_query.ndim != 4:
        raise InputError(f"index_query has shape {index_query.shape}; wanted [batch, q_len, index_heads, dim].")
    batch, q_len, heads, dim = index_query.shape
    if index_key.ndim != 3 or (index_key.shape[0], index_key.shape[2]) != (batch, dim):
        hint = "the indexer's heads share one key"
        raise InputError(f"index_key has shape {index_key.shape}; wanted [{batch}, kv_len, {dim}]: {hint}.")
    if weights.shape != (batch, q_len, heads):
        raise InputError(f"weights has shape {weights.shape}; wanted {[batch, q_len, heads]}.")
    if key_scale is not None and key_scale.shape != index_key.shape[:2]:
        raise InputError(f"key_scale has shape {key_scale.shape}; wanted {list(index_key.shape[:2])}.")
    for name in ("weights", "key_scale"):
        x = arrays[name]
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputTypeError(f"{name} is {x.dtype}; wanted a float dtype.")


def product_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype in which arrays are multiplied: the widest of float dtypes of two bytes and more, else bfloat16, in which int8
    and fp8 are exact."""
    wide = jnp.dtype(jnp.bfloat16)
    found = [jnp.dtype(d) for d in dtypes if jnp.issubdtype(d, jnp.floating) and jnp.dtype(d).itemsize > 1]
    for n, dtype in enumerate(found):
        wide = wider(wide, dtype) if n else dtype
    return jnp.dtype(jnp.float32) if wide.itemsize > 4 else wide


def head_scores(
    query: Shaped[Array, "rows heads dim"],
    key: Shaped[Array, "... keys dim"],
    softmax_scale: float,
    key_scale: Float[Array, "... keys"] | None = None,
) -> Float[Array, "rows heads keys"]:
    """scale * query . key of each head, before the relu, float32. Keys are shared by all rows, or each row has its own."""
    dtype = product_dtype(query.dtype, key.dtype)
    query, key = query.astype(dtype), key.astype(dtype)
    rows = ((0,), (0,)) if key.ndim == 3 else ((), ())
    sizes = ((2,), (key.ndim - 1,)), rows
    products = lax.dot_general(query, key, sizes, precision=exact(dtype), preferred_element_type=jnp.float32)
    products = products * softmax_scale
    if key_scale is None:
        return products
    scale = key_scale.astype(jnp.float32)
    return products * (scale[:, None] if key.ndim == 3 else scale[None, None])


def index_scores(per_head: Float[Array, "rows heads keys"], weights: Float[Array, "rows heads"]) -> jax.Array:
    """The scores [rows, keys] from those of the heads, float32."""
    weights = weights.astype(jnp.float32)
    positive = jnp.maximum(per_head, 0)
    sizes = ((1,), (1,)), ((0,), (0,))
    return lax.dot_general(
        weights, positive, sizes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
