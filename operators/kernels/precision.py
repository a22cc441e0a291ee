"""Products of a matrix unit whose factors aren't rounded, by the precision that they request."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["exact", "tile_product"]


def exact(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """The precision at which factors of a dtype lose no bits.

    A TPU multiplies bfloat16, and at the default precision rounds wider factors to it; a GPU rounds float32 to 10 bits.
    Never None, which would mean jax_default_matmul_precision: an operation's routes would then differ, and Mosaic
    accepts only the default for bfloat16.
    """
    return lax.Precision.DEFAULT if jnp.dtype(dtype) == jnp.bfloat16 else lax.Precision.HIGHEST


def tile_product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Matrix product over an axis of each, summed in float32."""
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact(a.dtype), preferred_element_type=jnp.float32)
