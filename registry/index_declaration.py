"""A declared call of an indexer: the shapes of its arrays, random ones, and the arguments of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigError
from ..planning.quantised import quantise
from ..planning.selection.index_operands import INDEX
from .call_declaration import CallDeclaration
from .drawn_integers import segments

__all__ = ["index_arguments", "index_arrays", "index_shapes"]

_OPTIONS = ("mask", "causal", "sliding_window", "query_offset", "softmax_scale", "mode")
_READ = frozenset({
    "batch", "q_len", "kv_len", "q_heads", "head_dim", "dtype", "kv_dtype", "kv_scales", "segment_ids", "kv_lengths", *_OPTIONS
})  # fmt: skip


def index_shapes(call: CallDeclaration, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the arrays, by argument name; q_heads and head_dim are the index heads and their dim. `dtype`: that of index
    queries and keys if none is declared. Errors: ConfigError for fields that only attention has, and for missing sizes."""
    _check_fields(call)
    n, wide = call.sizes(), jnp.dtype(call.dtype or dtype)
    dims = {**n, "index_heads": n["q_heads"], "index_dim": n["head_dim"]}

    def of(name: str, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(INDEX[name].shape(dims, "bthd"), jnp.dtype(dtype))

    shapes = {
        "index_query": of("index_query", wide),
        "index_key": of("index_key", call.kv_dtype or wide),
        "index_weights": of("index_weights", jnp.float32),
    }
    if call.kv_dtype is not None:
        shapes["key_scale"] = of("key_scale", jnp.float32)
    if call.segment_ids is not None:
        if call.segment_ids > min(n["q_len"], n["kv_len"]):
            raise ConfigError(
                f"call.segment_ids={call.segment_ids} segments in {min(n['q_len'], n['kv_len'])} tokens; wanted at most one per "
                "token."
            )
        shapes |= {name: of(name, jnp.int32) for name in ("q_segment_ids", "kv_segment_ids")}
    if (lengths := call.kv_lengths) is not None:
        if lengths is not True and (len(lengths) != n["batch"] or max(lengths) > n["kv_len"]):
            raise ConfigError(
                f"call.kv_lengths={list(lengths)}; wanted one per batch row, {n['batch']}, each at most call.kv_len="
                f"{n['kv_len']}."
            )
        shapes["kv_lengths"] = of("kv_lengths", jnp.int32)
    return shapes


def index_arrays(call: CallDeclaration, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Random arrays of these shapes, as CallDeclaration.draw makes them. The same seed gives the same arrays."""
    random, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, struct in index_shapes(call, dtype).items():
        if name == "index_key" and call.kv_dtype is not None:
            drawn = random.standard_normal(struct.shape, np.float32)[:, :, None]
            key, scale = quantise(drawn, call.kv_dtype, "token", "bthd")
            arrays["index_key"], arrays["key_scale"] = key[:, :, 0], scale[:, :, 0, 0]
        elif name == "key_scale":  # drawn with its keys
            continue
        elif name == "kv_lengths":
            kv_len = arrays["index_key"].shape[1]
            drawn_lengths = random.integers(1, kv_len, struct.shape, endpoint=True)
            arrays[name] = np.asarray(drawn_lengths if call.kv_lengths is True else call.kv_lengths, np.int32)
        elif name == "kv_segment_ids" and struct.shape == arrays["q_segment_ids"].shape:
            arrays[name] = arrays["q_segment_ids"]
        elif name.endswith("segment_ids"):
            arrays[name] = segments(random, struct.shape, call.segment_ids or 1)
        else:
            arrays[name] = random.standard_normal(struct.shape, np.float32).astype(struct.dtype)
    return arrays


def index_arguments(call: CallDeclaration, arrays: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """The keyword arguments of the call for these arrays. `mode` overrides the declared one."""
    options = {name: x for name in _OPTIONS if (x := getattr(call, name)) is not None}
    return {**arrays, **options, **({} if mode is None else {"mode": mode})}


def _check_fields(call: CallDeclaration) -> None:
    fields = type(call).model_fields
    for name in sorted(call.model_fields_set - _READ):
        if getattr(call, name) != fields[name].default:
            raise ConfigError(f"call.{name}: an indexer selects keys and has none; leave it out.")
    if call.kv_dtype is not None and call.is_set("kv_scales") and call.kv_scales != "token":
        raise ConfigError(
            f"call.kv_scales={call.kv_scales!r}: an indexer's keys have one scale per token; leave it out."
        )
