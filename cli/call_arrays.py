"""The arrays of a declared call: drawn at random, or read from an inputs file and checked against the declaration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from ..masks.int_arrays import beyond_int32, is_integer
from ..operators.call.call_values import check_lengths, check_offsets
from ..planning.quantised import QUANTISED, scale_shape
from ..registry.call_declaration import DECLARED_BY, CallDeclaration
from ..registry.declaration import Declaration
from ..sharding import ATTENTION
from .inputs import read_arrays

__all__ = ["CallArrays", "call_arrays", "call_shapes"]

_FLOATS = ("float32", "bfloat16", "float16")


class CallArrays(NamedTuple):
    """The arrays by argument name, the expected output, and notes on what was decided."""

    arrays: dict[str, Any]
    expected: np.ndarray | None
    notes: tuple[str, ...]


def call_arrays(declaration: Declaration, inputs: Path | None, seed: int) -> CallArrays:
    """Draw the arrays, or read them. Errors: InputError if the file and the declaration disagree."""
    if inputs is None:
        return CallArrays(dict(declaration.draw(seed)), None, (f"inputs drawn at random, seed {seed}",))
    return _read(declaration, inputs, seed)


def call_shapes(declaration: Declaration, inputs: Path | None) -> CallArrays:
    """The same as `call_arrays`, with shapes only, for a plan."""
    if inputs is None:
        return CallArrays(dict(declaration.shapes()), None, ())
    call_arrays = _read(declaration, inputs, 0)
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call_arrays.arrays.items()}
    return call_arrays._replace(arrays=structs)


def _read(declaration: Declaration, path: Path, seed: int) -> CallArrays:
    call = declaration.call
    table = call.with_captures(declaration.operands)
    names = {"mask", *(x.name for x in table if x.dtype != "key")}
    stored = read_arrays(path)
    missing = [x.name for x in ATTENTION.required if x.name not in stored]
    if missing:
        raise InputError(f"{path}: holds no {', '.join(missing)}; it holds {', '.join(stored) or 'nothing'}.")
    arrays: dict[str, Any] = {}
    notes: list[str] = []
    for name, array in stored.items():
        field = DECLARED_BY.get(name)
        if name == "expected":
            continue
        if name not in names:
            notes.append(f"{name} of {path.name} is not used: not an input of attention")
        elif field is not None and call.is_set(field) and getattr(call, field) is None:
            notes.append(f"{name} of {path.name} is not used: call.{field} is null")
        else:
            arrays[name] = _cast(name, array, call, path, notes)
    _agree_on_sizes(call, arrays, path)
    _agree_on_traced(call, arrays, path)
    if not call.deterministic:
        arrays["dropout_rng"] = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return CallArrays(arrays, stored.get("expected"), tuple(notes))


def _cast(name: str, array: np.ndarray, call: CallDeclaration, path: Path, notes: list[str]) -> np.ndarray:
    """Cast an array to a dtype that attention supports, and add a note."""
    if name in ("key", "value") and (call.kv_dtype is not None or array.dtype.name in QUANTISED):
        if call.is_set("kv_dtype") and array.dtype.name != call.kv_dtype:
            raise InputError(
                f"{path}: {name} is {array.dtype.name}, but call.kv_dtype={call.kv_dtype} is declared; a file's arrays are "
                "neither quantised nor dequantised. Make them agree, or leave call.kv_dtype out."
            )
        return array
    if name in ("query", "key", "value"):
        dtype = call.dtype or ("float32" if array.dtype == np.float64 else array.dtype.name)
        if array.dtype.kind not in "fV" or dtype not in _FLOATS:
            raise InputError(f"{path}: {name} has dtype {array.dtype}; wanted one of {', '.join(_FLOATS)}.")
        if dtype != array.dtype.name:
            why = "call.dtype" if call.dtype else "float64 is disabled"
            notes.append(f"{name} of {path.name} cast from {array.dtype.name} to {dtype} ({why})")
        return array.astype(jnp.dtype(dtype))
    operand = ATTENTION.get(name)
    if operand is not None and operand.dtype == "integers" and is_integer(array.dtype):
        reason = beyond_int32(array, name)
        if reason:
            raise InputError(f"{path}: {reason}.")
        return array.astype(np.int32)
    if array.dtype == np.float64:
        notes.append(f"{name} of {path.name} cast from float64 to float32")
        return array.astype(np.float32)
    return array


def _agree_on_sizes(call: CallDeclaration, arrays: Mapping[str, np.ndarray], path: Path) -> None:
    for operand in ATTENTION.required:
        name, dims, shape = operand.name, operand.dims_in(call.layout), arrays[operand.name].shape
        if len(shape) != len(dims):
            axes = ", ".join({"b": "batch", "t": "time", "h": "heads", "d": "dim"}[axis] for axis in call.layout)
            raise InputError(f"{path}: {name} has shape {shape}; layout {call.layout!r} requires [{axes}].")
        for dim, size in zip(dims, shape, strict=True):
            field = "q_heads" if dim == "heads" else dim
            declared = getattr(call, field)
            if call.is_set(field) and declared is not None and declared != size:
                raise InputError(
                    f"{path}: {name} has shape {shape}, so {field} is {size}, but call.{field}={declared} is declared; "
                    f"make them agree, or leave call.{field} out."
                )


def _agree_on_traced(call: CallDeclaration, arrays: dict[str, Any], path: Path) -> None:
    for name in call.captures():
        if name not in arrays:
            raise InputError(f"{path}: holds no {name}, which the score {call.score} of call.score needs; add it.")
    for name, shape in (call.operands or {}).items():
        if name not in arrays:
            raise InputError(f"{path}: holds no {name}, but call.operands.{name} is declared; add it, or leave it out.")
        if shape is not True and arrays[name].shape != tuple(shape):
            raise InputError(
                f"{path}: {name} has shape {arrays[name].shape}, but call.operands.{name}={list(shape)} is declared."
            )
    for field in ("bias", "softmax_aux", "dense_mask"):
        shape, name = getattr(call, field), "mask" if field == "dense_mask" else field
        if shape is None:
            continue
        if name not in arrays:
            raise InputError(
                f"{path}: holds no {name}, but call.{field} is declared; add it, or leave call.{field} out."
            )
        if arrays[name].shape != tuple(shape):
            raise InputError(
                f"{path}: {name} has shape {arrays[name].shape}, but call.{field}={list(shape)} is declared."
            )
    if call.is_set("kv_scales") and call.kv_scales is not None:
        for name in ("key", "value"):
            scale, expected = f"{name}_scale", scale_shape(arrays[name].shape, call.kv_scales, call.layout)
            got = f"holds no {scale}" if scale not in arrays else f"{scale} has shape {arrays[scale].shape}"
            if scale not in arrays or arrays[scale].shape != expected:
                raise InputError(
                    f"{path}: {got}, but call.kv_scales={call.kv_scales} is declared, shape {expected}; make them agree, or "
                    "leave call.kv_scales out."
                )
    if call.segment_ids is not None:
        ids = next((arrays[name] for name in ("q_segment_ids", "kv_segment_ids") if name in arrays), None)
        if ids is None:
            raise InputError(f"{path}: holds no q_segment_ids, but call.segment_ids={call.segment_ids} is declared.")
        max_segments = max(len(np.unique(row)) for row in np.atleast_2d(ids))
        if max_segments != call.segment_ids:
            raise InputError(
                f"{path}: has up to {max_segments} segments in a row, but call.segment_ids={call.segment_ids} is declared."
            )
    for name in ("kv_lengths", "kv_starts"):
        declared_value = getattr(call, name)
        if isinstance(declared_value, tuple):
            declared = np.array(declared_value, np.int32)
            if name in arrays and not np.array_equal(arrays[name], declared):
                got = arrays[name].tolist()
                raise InputError(f"{path}: {name} is {got}, but call.{name}={declared.tolist()} is declared.")
            arrays[name] = declared
        elif declared_value is True and name not in arrays:
            raise InputError(f"{path}: holds no {name}, but call.{name}=true is declared; add it, or give a list.")
    if call.query_offset is not None and "query_offset" in arrays:
        raise InputError(
            f"{path}: holds query_offset, and call.query_offset={call.query_offset} is declared; keep one."
        )
    # Checked here too, not only by the call: a plan gets only shapes.
    try:
        for name in ("kv_lengths", "kv_starts"):
            if name in arrays:
                check_lengths(name, arrays[name], arrays["key"].shape[call.layout.index("t")])
        if "query_offset" in arrays:
            check_offsets("query_offset", arrays["query_offset"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
