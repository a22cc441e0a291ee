"""The sizes of a call whose arrays are all in a table of operands, with shapes and dtypes checked against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ...errors import InputError
from ...sharding import OperandTable

__all__ = ["call_sizes"]


def call_sizes(table: OperandTable, shapes: Mapping[str, Any], layout: str) -> dict[str, int]:
    """Every dim's size, checked. What is stored may be of any dtype. Errors: InputError for a shape or a dtype that its row
    doesn't have."""
    sizes: dict[str, int] = {"batch": 1} if layout == "thd" else {}
    for name, x in shapes.items():
        row = table[name]
        dims = row.dims_in(layout)
        if len(x.shape) == len(dims):
            sizes = dict(zip(dims, x.shape, strict=True)) | sizes
            if "width" in sizes:
                sizes["history"] = sizes["width"] - 1
        accepted = row.accepted(tuple(x.shape), sizes, layout)
        if accepted is None:
            raise InputError(f"{name} has shape {tuple(x.shape)}; wanted {row.expected_shapes(sizes, layout)}.")
        sizes = dict(zip(accepted, x.shape, strict=True)) | sizes
        if row.dtype == "integers":
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise InputError(f"{name} is {x.dtype}; wanted integers.")
        elif row.dtype == "floats" and not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(f"{name} is {x.dtype}; wanted floats.")
    return sizes
