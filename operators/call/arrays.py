"""The arrays of a call by their operands' names."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import InputTypeError, a_type
from ...sharding import ATTENTION

__all__ = ["Arrays", "is_array", "shaped"]

_NOT_IN_JAX = (
    np.longdouble, np.clongdouble, np.object_, np.str_, np.bytes_, np.void, np.timedelta64, np.datetime64
)  # fmt: skip


class Arrays(NamedTuple):
    """Every array of a call (or its ShapeDtypeStruct) by its operand's name. A pytree. An array of attention that wasn't given
    reads as None."""

    by_name: dict[str, Any]
    mask_leaves: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name in ATTENTION:
            return self.by_name.get(name)
        raise AttributeError(name)

    def changed(self, **arrays: Any) -> Arrays:
        """The same with other arrays; None takes one out."""
        by_name = {name: x for name, x in (self.by_name | arrays).items() if x is not None}
        return self._replace(by_name=by_name)


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype: an array, a tracer or a ShapeDtypeStruct."""
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def shaped(name: str, value: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype, jax's own for floats (float32 for float64 without jax_enable_x64). An array that holds no floats,
    or should hold none, keeps its dtype, so that a message shows the one that was passed. Errors: InputTypeError if the value
    isn't an array."""
    if not is_array(value):
        raise InputTypeError(f"{name} is {a_type(value)}; wanted a jax or numpy array.")
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if dtype.type in _NOT_IN_JAX or not dtype.isnative:
            raise InputTypeError(f"{name} has dtype {dtype}, which jax doesn't have; cast it, e.g. to float32.")
        integers = name in ATTENTION and ATTENTION[name].dtype == "integers"
        if not integers and jnp.issubdtype(dtype, jnp.floating):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(value.shape, dtype)
