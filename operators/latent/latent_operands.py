"""The arrays of a latent attention, as a table, and their check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ...errors import InputError, a_type
from ...registry.latent_dims import LatentDims
from ...sharding import Operand, OperandTable

__all__ = ["LATENT", "check_arrays"]

LATENT = OperandTable(
    Operand("q_nope", ("batch", "q_len", "heads", "nope_dim"), "bthd", optional=False),
    Operand("q_rope", ("batch", "q_len", "heads", "rope_dim"), "bthd", optional=False),
    Operand("latent", ("batch", "kv_len", "latent_dim"), "btd", optional=False),
    Operand("rope_key", ("batch", "kv_len", "rope_dim"), "btd", optional=False),
    Operand("w_uk", ("latent_dim", "heads", "nope_dim"), optional=False),
    Operand("w_uv", ("latent_dim", "heads", "value_dim"), optional=False),
)


def check_arrays(dims: LatentDims, arrays: Mapping[str, Any], layout: str) -> dict[str, int]:
    """All sizes of a call, by dim; those of arrays that a step lacks aren't known. Errors: InputError for an array that isn't
    one, or with another shape or dtype.

    The weights may have a dtype of their own, and are used in that of what they multiply.
    """
    sizes = {name: getattr(dims, name) for name in ("heads", "nope_dim", "rope_dim", "value_dim", "latent_dim")}
    for name, x in arrays.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise InputError(f"{name} is {a_type(x)}; wanted an array, or a ShapeDtypeStruct in a plan.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(f"{name} is {x.dtype}; wanted a float dtype.")
    for first, second in (("q_nope", "q_rope"), ("latent", "rope_key")):
        if first in arrays and arrays[first].dtype != arrays[second].dtype:
            dtypes = arrays[first].dtype, arrays[second].dtype
            raise InputError(f"{first} is {dtypes[0]} and {second} {dtypes[1]}; wanted one dtype, as they are joined.")
    query, latent = arrays.get("q_nope"), arrays.get("latent")
    packed = "b" not in layout
    lengths = (("q_len", query, layout.index("t")), ("kv_len", latent, 0 if packed else 1), ("batch", query, 0))
    sizes["batch"] = 1
    for dim, x, axis in lengths:
        if x is not None and not (packed and dim == "batch") and len(x.shape) > axis:
            sizes[dim] = x.shape[axis]
    for name, x in arrays.items():
        row = LATENT[name]
        if row.accepted(tuple(x.shape), sizes, layout) is None:
            raise InputError(f"{name} has shape {tuple(x.shape)}; wanted {row.expected_shapes(sizes, layout)}.")
    return sizes
