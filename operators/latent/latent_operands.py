"""The arrays of a latent attention, as a table, and their check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ...call_arguments import CallArguments, CallArray
from ...errors import InputError, a_type
from ...registry.latent_dims import LatentDims
from ...sharding import Operand, OperandTable
from ..paged.step_arguments import StepArguments

__all__ = [
    "LATENT",
    "LatentArguments",
    "LatentStepArguments",
    "check_arrays",
    "check_queries",
    "dim_sizes",
    "names_of",
    "taken",
]

LATENT = OperandTable(
    Operand("q_nope", ("batch", "q_len", "heads", "nope_dim"), "bthd", optional=False),
    Operand("q_rope", ("batch", "q_len", "heads", "rope_dim"), "bthd", optional=False),
    Operand("latent", ("batch", "kv_len", "latent_dim"), "btd", optional=False),
    Operand("rope_key", ("batch", "kv_len", "rope_dim"), "btd", optional=False),
    Operand("w_uk", ("latent_dim", "heads", "nope_dim"), optional=False),
    Operand("w_uv", ("latent_dim", "heads", "value_dim"), optional=False),
    Operand("query_latent", ("batch", "q_len", "query_latent_dim"), "btd"),
    Operand("w_uq", ("query_latent_dim", "heads", "head_dim")),
    # They follow from positions. One row may serve the whole batch, so they aren't split over it.
    Operand(
        "q_cos", ("batch", "q_len", "rope_dim / 2"), "btd", broadcasts=True, gradient=False, split_as=("", "q_len", "")
    ),
    Operand(
        "q_sin", ("batch", "q_len", "rope_dim / 2"), "btd", broadcasts=True, gradient=False, split_as=("", "q_len", "")
    ),
)

_QUERIES = ("q_nope", "q_rope")
_QUERY_LATENTS = ("query_latent", "w_uq", "q_cos", "q_sin")
_DIMS = ("heads", "nope_dim", "rope_dim", "value_dim", "latent_dim", "head_dim")


class LatentArguments(CallArguments, total=False):
    """The keywords of a call of latent attention; query_latent_dim declares the first four."""

    query_latent: CallArray | None
    w_uq: CallArray | None
    q_cos: CallArray | None
    q_sin: CallArray | None


class LatentStepArguments(StepArguments, total=False):
    """Those of a step."""

    query_latent: CallArray | None
    w_uq: CallArray | None
    q_cos: CallArray | None
    q_sin: CallArray | None


def dim_sizes(dims: LatentDims) -> dict[str, int]:
    """The sizes of the dims that are declared, by name."""
    sizes = {name: getattr(dims, name) for name in _DIMS} | {"rope_dim / 2": dims.rope_dim // 2}
    return sizes if dims.query_latent_dim is None else sizes | {"query_latent_dim": dims.query_latent_dim}


def names_of(dims: LatentDims) -> tuple[str, ...]:
    """The arrays of a call: queries, or what they are made of."""
    without = _QUERY_LATENTS if dims.query_latent_dim is None else _QUERIES
    return tuple(name for name in LATENT.names if name not in without)


def taken(
    dims: LatentDims, positional: tuple[Any, ...], call: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays by name, other keywords) of a call or step. Errors: InputError for queries beside a declared query_latent_dim, and
    for what they are made of without one."""
    given = dict(zip(LATENT.names, positional, strict=False)) | {name: call.get(name) for name in _QUERY_LATENTS}
    wanted = names_of(dims)
    for name, x in given.items():
        if name not in wanted and x is not None:
            raise InputError(
                f"{name} is given, but query_latent_dim isn't declared; declare it, or pass q_nope and q_rope alone."
                if dims.query_latent_dim is None
                else f"{name} is given beside query_latent_dim={dims.query_latent_dim}; wanted None: queries are made of "
                "query_latent, w_uq, q_cos and q_sin."
            )
    return {name: given[name] for name in wanted}, {name: x for name, x in call.items() if name not in _QUERY_LATENTS}


def check_queries(arrays: Mapping[str, Any]) -> None:
    """Errors: InputError for a part of what makes the queries, or of what is written, of a step, which may lack either."""
    for group in (_QUERIES, ("query_latent", "q_cos", "q_sin"), ("latent", "rope_key")):
        names = [name for name in group if name in arrays]
        present = [name for name in names if arrays[name] is not None]
        if present and len(present) < len(names):
            missing = next(name for name in names if name not in present)
            raise InputError(f"{present[0]} is given without {missing}; wanted both, or neither.")
    if arrays.get("query_latent") is not None and arrays["w_uq"] is None:
        raise InputError("query_latent is given without w_uq; wanted both.")


def check_arrays(dims: LatentDims, arrays: Mapping[str, Any], layout: str) -> dict[str, int]:
    """All sizes of a call, by dim; those of arrays that a step lacks aren't known. Errors: InputError for an array that isn't
    one, or with another shape or dtype.

    The weights may have a dtype of their own, and are used in that of what they multiply.
    """
    sizes = dim_sizes(dims)
    for name, x in arrays.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise InputError(f"{name} is {a_type(x)}; wanted an array, or a ShapeDtypeStruct in a plan.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(f"{name} is {x.dtype}; wanted a float dtype.")
    for first, second in (_QUERIES, ("latent", "rope_key")):
        if first in arrays and arrays[first].dtype != arrays[second].dtype:
            dtypes = arrays[first].dtype, arrays[second].dtype
            raise InputError(f"{first} is {dtypes[0]} and {second} {dtypes[1]}; wanted one dtype, as they are joined.")
    packed = "b" not in layout
    made = arrays.get("query_latent")
    query, latent = arrays.get("q_nope") if made is None else made, arrays.get("latent")
    q_axis = layout.index("t") if made is None else layout.replace("h", "").index("t")
    lengths = (("q_len", query, q_axis), ("kv_len", latent, 0 if packed else 1), ("batch", query, 0))
    sizes["batch"] = 1
    for dim, x, axis in lengths:
        if x is not None and not (packed and dim == "batch") and len(x.shape) > axis:
            sizes[dim] = x.shape[axis]
    for name, x in arrays.items():
        row = LATENT[name]
        if row.accepted(tuple(x.shape), sizes, layout) is None:
            raise InputError(f"{name} has shape {tuple(x.shape)}; wanted {row.expected_shapes(sizes, layout)}.")
    return sizes
