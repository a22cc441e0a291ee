"""int8 and fp8 keys and values: their dtypes and their scales."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

__all__ = ["GRANULARITIES", "QUANTISED", "quantise", "scale_shape"]

QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
# What has its own scale -> the axes of a layout along which scales differ.
GRANULARITIES = {"tensor": "", "head": "h", "token": "bt", "token_head": "bth"}


def scale_shape(shape: Sequence[int], granularity: str, layout: str) -> tuple[int, ...]:
    """The shape of a key's or a value's scale, for a tensor of this shape in this layout."""
    differ = GRANULARITIES[granularity]
    return tuple(n if axis in differ else 1 for axis, n in zip(layout, shape, strict=True))


def quantise(x: np.ndarray, dtype: str, granularity: str, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (x divided by its scale, in `dtype`; the float32 scale). The largest value under a scale becomes the dtype's
    largest."""
    alone = tuple(i for i, n in enumerate(scale_shape((2,) * x.ndim, granularity, layout)) if n == 1)
    kind = jnp.dtype(dtype)
    maximum = float(jnp.iinfo(kind).max if dtype == "int8" else jnp.finfo(kind).max)
    largest = np.abs(x).max(axis=alone, keepdims=True)
    scale = np.where(largest == 0, 1, largest / maximum).astype(np.float32)
    whole = np.clip(x / scale, -maximum, maximum)
    return (np.round(whole) if dtype == "int8" else whole).astype(kind), scale
