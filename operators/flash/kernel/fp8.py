"""fp8 numbers from their bits: GPUs before Hopper can't convert them, and Triton refuses to do it there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["as_bits", "from_bits"]


def as_bits(x: jax.Array) -> jax.Array:
    """An fp8 array as int8; others unchanged."""
    return (
        lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating) else x
    )


def from_bits(x: jax.Array, stored: str, dtype: Any) -> jax.Array:
    """int8 bits of a float8_e4m3fn or float8_e5m2 array as numbers of a wider dtype, exactly."""
    bits = x.astype(jnp.int32)
    if stored == "float8_e5m2":  # the upper half of a float16
        return lax.bitcast_convert_type((bits << 8).astype(jnp.int16), jnp.float16).astype(dtype)
    if stored != "float8_e4m3fn":
        raise NotImplementedError(f"{stored}: wanted float8_e4m3fn or float8_e5m2.")
    # Shift exponent and fraction one place down in a float16, whose exponents are 8 less: subnormal numbers stay correct.
    magnitude, sign = bits & 0x7F, (bits & 0x80) << 8
    half = lax.bitcast_convert_type((magnitude << 7 | sign).astype(jnp.int16), jnp.float16)
    number = half.astype(jnp.float32) * 256.0
    return jnp.where(magnitude == 0x7F, jnp.nan, number).astype(dtype)
