"""Ways to make plain XLA run attention fast on a CPU; benchmarks/results/notes.md has what was measured.

On other platforms each function is the identity or the plain operation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.polynomial import chebyshev

from ...kernels.precision import exact

__all__ = [
    "as_bits",
    "compute_dtype",
    "exp2",
    "few_rows_product",
    "from_bits",
    "held_in_loop",
    "product",
    "widened",
]


def compute_dtype(dtype: np.dtype, softmax_dtype: np.dtype, platform: str) -> np.dtype:
    """The dtype of the factors of every product.

    XLA:CPU has no float16 product with a float32 result ("F16_F16_F32 not supported"); the cast up is exact.
    """
    if dtype == jnp.float16 and platform == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.float64) if softmax_dtype == jnp.float64 else jnp.dtype(dtype)


def product(form: str, a: jax.Array, b: jax.Array, dtype: np.dtype) -> jax.Array:
    """einsum of two factors of one dtype with an accumulator of `dtype`; no factor is rounded."""
    return jnp.einsum(form, a, b, precision=exact(a.dtype), preferred_element_type=dtype)


def few_rows_product(rows: jax.Array, keys: jax.Array, dtype: np.dtype, platform: str) -> jax.Array:
    """rows [..., n, x] times keys [..., s, x]: [..., n, s], for a few rows and many keys.

    In float32 XLA:CPU reads the keys twice as fast as the left factor. In bfloat16 the right one is as good, but keys for a
    single row would be converted to float32: hence a pair of rows.
    """
    if platform == "cpu" and rows.dtype == jnp.bfloat16 and rows.shape[-2] == 1:
        pair = jnp.concatenate([rows, rows], axis=-2)
        return few_rows_product(pair, keys, dtype, platform)[..., :1, :]
    if platform == "cpu" and rows.dtype == jnp.float32:
        return product("...sx,...nx->...sn", keys, rows, dtype).swapaxes(-1, -2)
    return product("...nx,...sx->...ns", rows, keys, dtype)


def as_bits(x: jax.Array, platform: str) -> jax.Array:
    """View bfloat16 as uint16, for copies and slices.

    XLA:CPU moves bfloat16 as float32, and then multiplies in float32 too, which is slower. And to write a slice into an array
    it converts the whole array.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if platform == "cpu" and x.dtype == jnp.bfloat16 else x


def held_in_loop(x: jax.Array, head: Any, row: Any, platform: str) -> jax.Array:
    """x, tied to a loop's indices so that it is sliced inside the loop.

    Otherwise XLA:CPU would convert or view the whole bfloat16 array before the loop, as a copy.
    """
    return lax.optimization_barrier((x, head, row))[0] if platform == "cpu" and x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Undo `as_bits`. The barrier keeps the view from being folded into a product, which would then be float32."""
    return lax.optimization_barrier(lax.bitcast_convert_type(x, dtype)) if x.dtype == jnp.uint16 else x


def widened(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """bfloat16 as its bits, or any other array, in a wider dtype."""
    if bits.dtype != jnp.uint16:
        return bits.astype(dtype)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) * np.uint32(1 << 16), jnp.float32).astype(dtype)


def exp2(x: jax.Array, platform: str, accurate: bool) -> jax.Array:
    """2**x for x at most a little above 0; exactly 0 below -127, and for -inf.

    On CPU in float32 it uses a polynomial on [-1/2, 1/2] and assembles the exponent from bits, which takes less time than
    jnp.exp2. The relative error is 2e-7, or 1e-4 if not `accurate` (for bfloat16 results).
    """
    if platform != "cpu" or x.dtype != jnp.float32:
        return jnp.exp2(x)
    x = jnp.maximum(x, np.float32(-127))
    whole = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)  # (x + M) - M would be simplified away
    part = x - whole
    power = jnp.full_like(part, _POLYNOMIALS[accurate][0])
    for coefficient in _POLYNOMIALS[accurate][1:]:
        power = power * part + coefficient
    return power * lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)


def _polynomial(degree: int) -> list[np.float32]:
    """2**x on [-1/2, 1/2], interpolated at Chebyshev's points; highest power first."""
    series = chebyshev.Chebyshev.interpolate(np.exp2, degree, domain=[-0.5, 0.5])
    return [np.float32(c) for c in series.convert(kind=np.polynomial.Polynomial).coef[::-1]]


_POLYNOMIALS = {True: _polynomial(5), False: _polynomial(3)}
