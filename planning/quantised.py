"""int8 and fp8 keys and values: their dtypes, their scales, and what a plan says where a method dequantises them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from .explain import bytes_text

if TYPE_CHECKING:
    from .placement import Placement
    from .problem import AttentionProblem

__all__ = ["GRANULARITIES", "QUANTISED", "dequantised_copy", "quantise", "scale_shape"]

QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
# What has a scale of its own -> the axes of a layout along which scales differ.
GRANULARITIES = {"tensor": "", "head": "h", "token": "bt", "token_head": "bth"}
_ITEMSIZE = {"float64": 8, "float32": 4}


def dequantised_copy(problem: AttentionProblem, placement: Placement) -> str:
    """`a dequantised copy of key and value (bfloat16, 12.0 MiB a device, beside 6.0 MiB as given)`."""
    local, dims = placement.local, {"key": problem.head_dim, "value": problem.value_dim}
    given = local.batch * local.kv_heads * local.kv_len * sum(dims[name] for name in problem.quantised)
    copied = given * _ITEMSIZE.get(problem.runtime_dtype, 2)
    return (
        f"a dequantised copy of {' and '.join(problem.quantised)} ({problem.runtime_dtype}, {bytes_text(copied)} a device, "
        f"beside {bytes_text(given)} as given)"
    )


def scale_shape(shape: Sequence[int], granularity: str, layout: str) -> tuple[int, ...]:
    """The shape of a key's or a value's scale, for a tensor of this shape in this layout."""
    differ = GRANULARITIES[granularity]
    return tuple(n if axis in differ else 1 for axis, n in zip(layout, shape, strict=True))


def quantise(x: np.ndarray, dtype: str, granularity: str, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """(x over its scale in `dtype`, the float32 scale): the largest value that shares a scale becomes the dtype's largest."""
    alone = tuple(i for i, n in enumerate(scale_shape((2,) * x.ndim, granularity, layout)) if n == 1)
    kind = jnp.dtype(dtype)
    most = float(jnp.iinfo(kind).max if dtype == "int8" else jnp.finfo(kind).max)
    largest = np.abs(x).max(axis=alone, keepdims=True)
    scale = np.where(largest == 0, 1, largest / most).astype(np.float32)
    whole = np.clip(x / scale, -most, most)
    return (np.round(whole) if dtype == "int8" else whole).astype(kind), scale
