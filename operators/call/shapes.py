"""Checks every shape and dtype of a call against the others; once per distinct call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import ConfigError, InputError, InputTypeError, shown
from ...masks.checks import LIMIT
from ...masks.int_arrays import is_integer
from ...planning import LeafShape
from ...planning.quantised import QUANTISED
from ...registry import OperationMetadata
from ...sharding import ATTENTION, OperandTable
from ...symbolic import is_symbolic
from .arrays import Arrays
from .options import Options

__all__ = [
    "check_dtypes", "check_key", "check_offset", "check_operands", "check_scales", "leaf_shape", "sizes_of", "with_segments",
]  # fmt: skip


_WORDS = {
    "batch": "batch size", "q_len": "length", "kv_len": "length", "heads": "number of heads", "kv_heads": "number of heads",
    "head_dim": "head dim", "value_dim": "value dim",
}  # fmt: skip


def sizes_of(arrays: Arrays, layout: str) -> dict[str, int]:
    """The size of each logical dim, read from the required operands and checked between them; batch is 1 in a packed layout."""
    words = {"bthd": "[batch, time, heads, dim]", "bhtd": "[batch, heads, time, dim]", "thd": "[tokens, heads, dim]"}
    sizes: dict[str, int] = {}
    read: dict[str, str] = {}
    for operand in ATTENTION.required:
        name, dims, shape = operand.name, operand.dims_in(layout), arrays.by_name[operand.name].shape
        if len(shape) != len(dims):
            raise InputError(f"{name} has shape {shape}; layout {layout!r} requires {words[layout]}.")
        if 0 in shape:
            raise InputError(f"{name} has shape {shape}; wanted at least one element along every dimension.")
        for dim, size in zip(dims, shape, strict=True):
            if dim not in ("batch", "q_len", "kv_len") and is_symbolic(size):
                raise InputError(
                    f"{name} has shape {shape}; wanted numbers for heads and head dim, not the symbolic {size}: only the batch "
                    "and the lengths may be symbolic."
                )
    for operand in ATTENTION.required:
        for dim, size in zip(operand.dims_in(layout), arrays.by_name[operand.name].shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                every = ", ".join(f"{row.name} {arrays.by_name[row.name].shape}" for row in ATTENTION.required)
                raise InputError(
                    f"{read[dim]} and {operand.name} differ in {_WORDS[dim]}: {sizes[dim]} and {size} ({every}, layout "
                    f"{layout!r})."
                )
            read.setdefault(dim, operand.name)
    if sizes["heads"] % sizes["kv_heads"]:
        raise InputError(
            f"query has {sizes['heads']} heads and key {sizes['kv_heads']}; wanted query heads to be a multiple of kv heads."
            + _other_layout(arrays, layout)
        )
    return {"batch": 1} | sizes


def _other_layout(arrays: Arrays, layout: str) -> str:
    """A hint if heads and time would fit the other way round, in heads that are fewer than the tokens."""
    if layout == "thd":
        return ""
    (q_heads, _), (kv_heads, kv_len) = (
        [arrays.by_name[n].shape[layout.index(a)] for a in "th"] for n in ("query", "key")
    )
    swapped = "bhtd" if layout == "bthd" else "bthd"
    fits = q_heads % kv_heads == 0 and kv_heads < kv_len
    return f" Did you mean layout={swapped!r}? This call's is {layout!r}." if fits else ""


def with_segments(arrays: Arrays, layout: str, sizes: Mapping[str, int]) -> Arrays:
    """The arrays with segment ids for queries and keys, if either has them; one stands for both where the lengths are equal."""
    q, kv = arrays.q_segment_ids, arrays.kv_segment_ids
    if q is None and kv is None:
        if layout == "thd":
            raise InputError("layout 'thd' packs sequences, so q_segment_ids [tokens] is required; pass it.")
        return arrays
    if q is None or kv is None:
        q_len, kv_len = sizes["q_len"], sizes["kv_len"]
        if q_len != kv_len:
            missing = "q_segment_ids" if q is None else "kv_segment_ids"
            raise InputError(f"{missing} is missing, but q_len={q_len} and kv_len={kv_len} differ; pass both.")
        q = kv = q if kv is None else kv
    return arrays.changed(q_segment_ids=q, kv_segment_ids=kv)


def check_dtypes(arrays: Arrays, metadata: OperationMetadata) -> None:
    """Check that query, key and value are floats of one dtype, except for quantised key and value; and the declared dtypes."""
    for name in ("runtime_dtype", "runtime_softmax_dtype"):
        declared = getattr(metadata, name)
        if declared is not None and jax.dtypes.canonicalize_dtype(declared) != declared:
            raise ConfigError(
                f"{name}={declared.name!r}, but jax_enable_x64 is off, so jax would compute in "
                f"{jax.dtypes.canonicalize_dtype(declared).name}; turn it on before the call, with "
                "jax.config.update('jax_enable_x64', True) or JAX_ENABLE_X64=1, or declare float32."
            )
    dtypes = {row.name: arrays.by_name[row.name].dtype for row in ATTENTION.required}
    dtypes = {name: d for name, d in dtypes.items() if ATTENTION[name].dtype != "stored" or d.name not in QUANTISED}
    for name, dtype in dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            quantised = "" if name == "query" else f"; or, quantised, {', '.join(QUANTISED)}"
            raise InputTypeError(f"{name} has dtype {dtype.name}; wanted float32, bfloat16 or float16{quantised}.")
    if metadata.runtime_dtype is None and len(set(dtypes.values())) > 1:
        got = ", ".join(f"{n} {d.name}" for n, d in dtypes.items())
        raise InputTypeError(f"dtypes differ: {got}; cast them, or declare runtime_dtype and they are cast to it.")


def check_scales(arrays: Arrays, layout: str) -> None:
    """Check that what has a scale is quantised, and that int8 has one."""
    words = {"bthd": "[batch, kv, kv_heads, 1]", "bhtd": "[batch, kv_heads, kv, 1]", "thd": "[kv, kv_heads, 1]"}[layout]
    for name in ("key", "value"):
        tensor, scale = arrays.by_name[name], arrays.by_name.get(f"{name}_scale")
        quantised = tensor.dtype.name in QUANTISED
        if scale is None:
            if tensor.dtype == jnp.int8:
                raise InputError(
                    f"{name} is int8, but {name}_scale is missing; pass it, floats that broadcast to {words}."
                )
            continue
        if not quantised:
            raise InputError(
                f"{name}_scale was given, but {name} is {tensor.dtype.name}, which isn't quantised; leave it out, or multiply "
                f"{name} by it before the call."
            )


def check_operands(arrays: Arrays, table: OperandTable, layout: str, sizes: Mapping[str, int]) -> None:
    """Check the dtype and the shape of each optional operand by its row of the table."""
    for operand in table:
        array = arrays.by_name.get(operand.name)
        if array is None or not operand.optional or operand.dtype == "key":
            continue
        check = is_integer(array.dtype) if operand.dtype == "integers" else jnp.issubdtype(array.dtype, jnp.floating)
        if not check:
            hint = f" {operand.hint}" if operand.hint else ""
            raise InputTypeError(f"{operand.name} has dtype {array.dtype.name}; wanted {operand.dtype}.{hint}")
        if operand.accepted(array.shape, sizes, layout) is None:
            raise InputError(
                f"{operand.name} has shape {array.shape}; wanted {operand.expected_shapes(sizes, layout)}."
            )


def check_offset(options: Options) -> None:
    """Check a static query offset."""
    if options.query_offset is not None and not is_symbolic(options.query_offset) and abs(options.query_offset) > LIMIT:
        raise InputError(
            f"query_offset={shown(options.query_offset)}; wanted at most 2**30 either way, or int32 positions overflow."
        )


def check_key(rng: Any) -> None:
    """Check that the dropout key is one key: jax.random.key(...) or a raw uint32 one."""
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if not (typed and rng.shape == ()) and not (rng.dtype == jnp.uint32 and len(rng.shape) == 1):
        raise InputTypeError(
            f"dropout_rng has dtype {rng.dtype} and shape {rng.shape}; wanted one key, such as jax.random.key(0)."
        )


def leaf_shape(name: str, array: jax.ShapeDtypeStruct, dims: tuple[str, ...], sizes: dict[str, int]) -> LeafShape:
    length = {**sizes, "q": sizes["q_len"], "kv": sizes["kv_len"]}
    full = tuple(length[d] for d in dims)
    if name.startswith("mask"):
        if len(array.shape) != 4 or any(n not in (1, m) for n, m in zip(array.shape, full, strict=True)):
            raise InputError(
                f"mask has shape {array.shape}; wanted four dimensions that broadcast to [batch, heads, q, kv] = {full}."
            )
    elif tuple(array.shape) != full:
        raise InputError(f"{name} has shape {tuple(array.shape)}; wanted {full} ({', '.join(dims)}).")
    return LeafShape(name, tuple(array.shape), tuple(dims), str(jax.dtypes.canonicalize_dtype(array.dtype)))
