"""Numbers of 8 bits as numbers of 16: on tensor cores both factors have one dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_sizes import swizzled_columns

__all__ = ["ROWS", "WIDENED", "widen_part", "widen_tile"]

ROWS = 64  # that a warpgroup widens at once
WIDENED = plgpu.Layout.WGMMA_UPCAST_2X  # how it holds them meanwhile


def widen_part(
    stored: Any,
    wide: Any,
    at: tuple[Any, Any],
    change: Callable[[jax.Array], jax.Array] | None = None,
    scales: jax.Array | None = None,
) -> None:
    """Rows and columns of a place in shared memory to those of another, times scales, rounded once, or changed on the way.

    GPUs convert int8 to bfloat16 and fp8 to float16 with few instructions, which is exact; others go through float32.
    """
    x = plgpu.load(stored.at[at], layout=WIDENED)  # type: ignore[call-arg] # of jax 0.10
    x = x.astype(jnp.bfloat16 if x.dtype == jnp.int8 else jnp.float16)
    if scales is not None or x.dtype != wide.dtype:
        x = x.astype(jnp.float32)
        x = (x if scales is None else x * scales).astype(wide.dtype)
    wide[at] = x if change is None else change(x)


def widen_tile(stored: Any, wide: Any, scales: Any) -> None:
    """A whole tile [keys, columns]. scales: one of each key, or None."""
    keys, columns = wide.shape
    step, along = swizzled_columns(columns), None
    for row in range(0, keys, ROWS):
        if scales is not None:
            of_rows = plgpu.load(scales.at[pl.ds(row, ROWS)], layout=WIDENED.reduce(1), optimized=False)  # type: ignore[call-arg]
            along = lax.broadcast_in_dim(of_rows, (ROWS, step), (0,))
        for column in range(0, columns, step):
            widen_part(stored, wide, (pl.ds(row, ROWS), pl.ds(column, step)), scales=along)
