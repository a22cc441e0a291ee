"""2**x of a tile, where exponentials would be what its loop waits for.

A multiprocessor computes 16 exponentials a cycle and 128 products: while the former work, most places for instructions are empty.
Some columns' exponentials by a polynomial take these places. M. Shah et al., FlashAttention-4, 2026, 3.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["exp2"]

# 2**f for -1/2 <= f <= 1/2, and 1 at 0; the largest relative error is 1.1e-7, and 1.6e-7 in float32.
_TERMS = (0.6931469776, 0.2402224209, 0.05550733743, 0.009671512640, 0.001326472714)
_LEAST = -127.0  # the exponent that stands for 0
# Of a sum with it the last bits are the other number, rounded, plus 127: as the exponent of a float32 is stored.
_ROUNDING = 1.5 * 2**23 - _LEAST
_MANTISSA = 23  # bits


def exp2(x: jax.Array, by_products: int) -> jax.Array:
    """2**x of x [rows, columns], at most about 1; of the last `by_products` columns by a polynomial, which has float32's accuracy
    and gives 0 where x rounds to -127 or less."""
    columns = x.shape[1] - by_products
    if not by_products:
        return jnp.exp2(x)
    return jnp.concatenate([jnp.exp2(x[:, :columns]), _by_products(x[:, columns:])], axis=1)


def _by_products(x: jax.Array) -> jax.Array:
    x = jnp.maximum(x, _LEAST)
    shifted = x + _ROUNDING
    fraction = x - (shifted - _ROUNDING)
    *terms, last = _TERMS
    total = jnp.full_like(x, last)
    for term in (*reversed(terms), 1.0):
        total = total * fraction + term
    return total * lax.bitcast_convert_type(lax.bitcast_convert_type(shifted, jnp.int32) << _MANTISSA, jnp.float32)
