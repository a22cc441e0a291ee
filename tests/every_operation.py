"""A mask function of each operation that kernels are said to compile. What it shows isn't the point."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_FIVE = jnp.int32(5)


def every_operation(x: Any, j: Any) -> Any:
    """Each operation that both compilers are said to take."""
    x, j = jnp.broadcast_arrays(x, j)
    f, g = x.astype(jnp.float32), j.astype(jnp.float32) + 1
    u = x.astype(jnp.uint32)
    waves = jnp.sin(f) + jnp.cos(g) + jnp.tan(f) + jnp.tanh(g) + jnp.arctan2(f, g) + jax.nn.sigmoid(f) + jax.nn.relu(f)
    powers = (
        jnp.exp(-f)
        + jnp.exp2(-g)
        + jnp.log(g)
        + jnp.log1p(g)
        + jnp.sqrt(f)
        + jax.lax.rsqrt(g)
        + f**1.5
        + f**3
        + jnp.square(f)
    )
    steps = jnp.floor(f / 3) + jnp.ceil(g / 3) + jnp.nextafter(f, g) + jnp.clip(f, 1, 9) + jax.lax.clamp(1.0, g, 7.0)
    whole = x // 3 + j % 5 - abs(x - j) * jnp.sign(x - j) + jnp.maximum(x, j) + jnp.minimum(-x, j) + (x << 2) + (x >> 1)
    bits = (x & j) | (~x ^ j) + jax.lax.population_count(x) + jax.lax.clz(j) + jax.lax.shift_right_logical(
        x, jnp.ones_like(x)
    )
    looped = jax.lax.fori_loop(0, 3, lambda _, a: a + x, j)
    looped = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + x), (0, looped))[1]
    hashed = (u * jnp.uint32(2654435761)).astype(jnp.int32) + jax.lax.bitcast_convert_type(f, jnp.int32)
    flags = (x <= j) | (x != j) & ~(x > j) ^ (x >= j) & jnp.isfinite(waves + powers + steps)
    numbers = jax.lax.stop_gradient(jnp.where(flags, whole + bits, looped + hashed))
    return (numbers == jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 0)) | (waves + powers > steps) | (j < _FIVE)
