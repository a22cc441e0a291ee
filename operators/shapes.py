"""Checks every shape and dtype of a call against the others; once per distinct call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConfigError, InputError, InputTypeError, shown
from ..masks.checks import LIMIT
from ..masks.int_arrays import is_integer
from ..planning import LeafShape
from ..planning.quantised import QUANTISED
from ..registry import OperationMetadata
from ..symbolic import is_symbolic
from .arguments import Arrays, Options

__all__ = [
    "broadcastable", "check_dtypes", "check_extras", "check_key", "check_scales", "leaf_shape", "sizes_of", "with_segments",
]  # fmt: skip


def sizes_of(arrays: Arrays, layout: str) -> dict[str, int]:
    """b, t (q), s (kv), h, k (kv heads), d, e (value dim), checked against each other."""
    rank = len(layout)
    words = {"bthd": "[batch, time, heads, dim]", "bhtd": "[batch, heads, time, dim]", "thd": "[tokens, heads, dim]"}
    for name in ("query", "key", "value"):
        shape = getattr(arrays, name).shape
        if len(shape) != rank:
            raise InputError(f"{name} has shape {shape}; layout {layout!r} requires {words[layout]}.")
        if 0 in shape:
            raise InputError(f"{name} has shape {shape}; wanted at least one element along every dimension.")
        fixed = [size for axis, size in zip(layout, shape, strict=True) if axis in "hd" and is_symbolic(size)]
        if fixed:
            raise InputError(
                f"{name} has shape {shape}; wanted numbers for heads and head dim, not the symbolic {fixed[0]}: only the batch "
                "and the lengths may be symbolic."
            )
    q, k, v = (dict(zip(layout, getattr(arrays, n).shape, strict=True)) for n in ("query", "key", "value"))
    for axis, first, other, pair in (
        ("b", q, k, "query and key"),
        ("b", k, v, "key and value"),
        ("d", q, k, "query and key"),
        ("t", k, v, "key and value"),
        ("h", k, v, "key and value"),
    ):
        if first.get(axis) != other.get(axis):
            word = {"b": "batch size", "d": "head dim", "t": "length", "h": "number of heads"}[axis]
            raise InputError(
                f"{pair} differ in {word}: {first[axis]} and {other[axis]} (query {arrays.query.shape}, key "
                f"{arrays.key.shape}, value {arrays.value.shape}, layout {layout!r})."
            )
    if q["h"] % k["h"]:
        raise InputError(
            f"query has {q['h']} heads and key {k['h']}; wanted query heads to be a multiple of kv heads."
            + _other_layout(arrays, layout)
        )
    return {"b": q.get("b", 1), "t": q["t"], "s": k["t"], "h": q["h"], "k": k["h"], "d": q["d"], "e": v["d"]}


def _other_layout(arrays: Arrays, layout: str) -> str:
    """A hint if heads and time would fit the other way round, in heads that are fewer than the tokens."""
    if layout == "thd":
        return ""
    (q_heads, _), (kv_heads, kv_len) = (
        [getattr(arrays, n).shape[layout.index(a)] for a in "th"] for n in ("query", "key")
    )
    swapped = "bhtd" if layout == "bthd" else "bthd"
    fits = q_heads % kv_heads == 0 and kv_heads < kv_len
    return f" Did you mean layout={swapped!r}? This call's is {layout!r}." if fits else ""


def with_segments(arrays: Arrays, layout: str, batch: int, q_len: int, kv_len: int) -> Arrays:
    q, kv = arrays.q_segment_ids, arrays.kv_segment_ids
    if q is None and kv is None:
        if layout == "thd":
            raise InputError("layout 'thd' packs sequences, so q_segment_ids [tokens] is required; pass it.")
        return arrays
    if q is None or kv is None:
        if q_len != kv_len:
            missing = "q_segment_ids" if q is None else "kv_segment_ids"
            raise InputError(f"{missing} is missing, but q_len={q_len} and kv_len={kv_len} differ; pass both.")
        q = kv = q if kv is None else kv
    for name, ids, length in (("q_segment_ids", q, q_len), ("kv_segment_ids", kv, kv_len)):
        want = (length,) if layout == "thd" else (batch, length)
        if ids.shape != want:
            raise InputError(f"{name} has shape {ids.shape}; wanted {want}.")
        _need_integers(name, ids)
    return arrays._replace(q_segment_ids=q, kv_segment_ids=kv)


def _need_integers(name: str, array: jax.ShapeDtypeStruct) -> None:
    if not is_integer(array.dtype):
        raise InputTypeError(f"{name} has dtype {array.dtype.name}; wanted integers.")


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
    dtypes = {name: getattr(arrays, name).dtype for name in ("query", "key", "value")}
    dtypes = {name: d for name, d in dtypes.items() if name == "query" or d.name not in QUANTISED}
    for name, dtype in dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            quantised = "" if name == "query" else f"; or, quantised, {', '.join(QUANTISED)}"
            raise InputTypeError(f"{name} has dtype {dtype.name}; wanted float32, bfloat16 or float16{quantised}.")
    if metadata.runtime_dtype is None and len(set(dtypes.values())) > 1:
        got = ", ".join(f"{n} {d.name}" for n, d in dtypes.items())
        raise InputTypeError(f"dtypes differ: {got}; cast them, or declare runtime_dtype and they are cast to it.")


def check_scales(arrays: Arrays, layout: str) -> None:
    """Check key_scale and value_scale against their tensors: rank, dims and dtype; int8 needs one."""
    words = {"bthd": "[batch, kv, kv_heads, 1]", "bhtd": "[batch, kv_heads, kv, 1]", "thd": "[kv, kv_heads, 1]"}[layout]
    for name in ("key", "value"):
        tensor, scale = getattr(arrays, name), getattr(arrays, f"{name}_scale")
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
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            raise InputTypeError(f"{name}_scale has dtype {scale.dtype.name}; wanted floats.")
        full = (*tensor.shape[:-1], 1)
        if len(scale.shape) != len(full) or any(n not in (1, m) for n, m in zip(scale.shape, full, strict=True)):
            raise InputError(
                f"{name}_scale has shape {scale.shape}; wanted {full} ({words}), or 1 in place of any of these sizes."
            )


def check_extras(arrays: Arrays, options: Options, sizes: dict[str, int]) -> None:
    b, t, s, h, k = (sizes[a] for a in "btshk")
    if arrays.bias is not None:
        if not jnp.issubdtype(arrays.bias.dtype, jnp.floating):
            raise InputTypeError(
                f"bias has dtype {arrays.bias.dtype.name}; wanted floats. A boolean mask goes to mask=."
            )
        broadcastable("bias", arrays.bias.shape, (b, h, t, s))
    if arrays.softmax_aux is not None:
        shape = arrays.softmax_aux.shape
        if not jnp.issubdtype(arrays.softmax_aux.dtype, jnp.floating):
            raise InputTypeError(f"softmax_aux has dtype {arrays.softmax_aux.dtype.name}; wanted floats.")
        if shape != (h,) and not (len(shape) == 2 and shape[0] in (h, k) and shape[1] > 0):
            raise InputError(f"softmax_aux has shape {shape}; wanted ({h},), ({h}, sinks) or ({k}, sinks).")
    for name in ("kv_lengths", "kv_starts", "query_offset"):
        array = getattr(arrays, name)
        if array is not None:
            _need_integers(name, array)
            if array.shape != (b,) and not (name == "query_offset" and array.shape == ()):
                raise InputError(f"{name} has shape {array.shape}; wanted ({b},), one number per batch row.")
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


def broadcastable(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise InputError(
            f"{name} has shape {shape}; wanted four dimensions that broadcast to [batch, heads, q, kv] = {full}."
        )


def leaf_shape(name: str, array: jax.ShapeDtypeStruct, dims: tuple[str, ...], sizes: dict[str, int]) -> LeafShape:
    length = {"batch": sizes["b"], "heads": sizes["h"], "q": sizes["t"], "kv": sizes["s"]}
    full = tuple(length[d] for d in dims)
    if name.startswith("mask"):
        broadcastable("mask", array.shape, full)
    elif tuple(array.shape) != full:
        raise InputError(f"{name} has shape {tuple(array.shape)}; wanted {full} ({', '.join(dims)}).")
    return LeafShape(name, tuple(array.shape), tuple(dims), str(jax.dtypes.canonicalize_dtype(array.dtype)))
