"""The arrays of a declared indexer's call: drawn at random, or read from an inputs file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from ..planning.selection.index_operands import INDEX
from ..registry.declaration import Declaration
from .inputs import read_arrays

__all__ = ["index_input_shapes", "index_inputs"]

_DIMS = {"index_heads": "q_heads", "index_dim": "head_dim"}


def index_inputs(declaration: Declaration, inputs: Path | None, seed: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the arrays by argument name, notes). Errors: InputError if the file and the declaration disagree."""
    if inputs is None:
        return dict(declaration.draw(seed)), (f"inputs drawn at random, seed {seed}",)
    return _read(declaration, inputs)


def index_input_shapes(declaration: Declaration, inputs: Path | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The same with shapes only, for a plan."""
    if inputs is None:
        return dict(declaration.shapes()), ()
    arrays, notes = _read(declaration, inputs)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}, notes


def _read(declaration: Declaration, path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    stored, call = read_arrays(path), declaration.call
    missing = [row.name for row in INDEX if not row.optional and row.name not in stored]
    if missing:
        raise InputError(f"{path}: holds no {', '.join(missing)}; it holds {', '.join(stored) or 'nothing'}.")
    arrays, notes = dict[str, Any](), list[str]()
    for name, array in stored.items():
        row = INDEX.get("query_offsets" if name == "query_offset" else name)
        if row is None or name == "query_offsets":
            notes.append(f"{name} of {path.name} is not used: not an input of an indexer")
            continue
        if array.dtype == np.float64:
            notes.append(f"{name} of {path.name} cast from float64 to float32")
        wanted = call.dtype if name in ("index_query", "index_key") and array.dtype.itemsize > 1 else None
        dtype = jnp.float32 if array.dtype == np.float64 else jnp.int32 if row.dtype == "integers" else array.dtype
        arrays[name] = array.astype(jnp.dtype(wanted or dtype))
        for dim, size in zip(row.dims, array.shape, strict=False):
            field = _DIMS.get(dim, dim)
            declared = getattr(call, field) if call.is_set(field) else None
            if declared is not None and declared != size:
                raise InputError(
                    f"{path}: {name} has shape {array.shape}, so {field} is {size}, but call.{field}={declared} is declared; "
                    f"make them agree, or leave call.{field} out."
                )
    for field, name in (("kv_lengths", "kv_lengths"), ("segment_ids", "q_segment_ids"), ("kv_dtype", "key_scale")):
        if getattr(call, field) is not None and name not in arrays:
            raise InputError(
                f"{path}: holds no {name}, but call.{field} is declared; add it, or leave call.{field} out."
            )
    if isinstance(call.kv_lengths, tuple) and arrays["kv_lengths"].tolist() != list(call.kv_lengths):
        raise InputError(
            f"{path}: kv_lengths is {arrays['kv_lengths'].tolist()}, but call.kv_lengths is {list(call.kv_lengths)}."
        )
    if call.query_offset is not None and "query_offset" in arrays:
        raise InputError(
            f"{path}: holds query_offset, and call.query_offset={call.query_offset} is declared; keep one."
        )
    return arrays, tuple(notes)
