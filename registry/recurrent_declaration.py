"""A declared call of a recurrent operation: the shapes of its arrays, random ones, and the arguments of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigError, nearest
from ..planning.recurrent.step_operands import CONV_ROWS
from ..sharding import Operand, OperandTable
from .call_declaration import CallDeclaration
from .drawn_integers import segments
from .slots_declaration import STEP_FIELDS, batch_shapes, drawn_batch, is_step, step_sizes

__all__ = ["recurrent_arguments", "recurrent_arrays", "recurrent_shapes"]

_READ = frozenset({
    "batch", "q_len", "q_heads", "kv_heads", "head_dim", "value_dim", "dims", "dtype", "layout", "mode", "segment_ids",
    "operands",
})  # fmt: skip
_FIELDS = {"heads": "q_heads", **STEP_FIELDS}  # the other dims are declared by their own names
_OF_CALL = ("batch", "q_len", "heads", "kv_heads", "head_dim", "value_dim")
_OF_STEP = ("rows", "tokens", *_OF_CALL[2:])
_OF_BATCH = ("slots", "columns", "shards")  # that a step declares in dims, or not at all


def recurrent_shapes(
    call: CallDeclaration, dtype: str, table: OperandTable, state_dtype: str | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the arrays by name: those that every call has, and those of `call.operands`; of a step also those of its
    batch. `dtype`: theirs if none is declared; state_dtype: that of a step's slots, None for theirs.

    Errors: ConfigError for fields that only attention has, and for missing sizes."""
    fields = type(call).model_fields
    for name in sorted(call.model_fields_set - _READ):
        if getattr(call, name) != fields[name].default:
            raise ConfigError(f"call.{name}: a recurrent operation has none; leave it out.")
    if call.segment_ids is not None and "segment_ids" not in table:
        raise ConfigError("call.segment_ids: the rows of a step are its sequences; leave it out.")
    sizes, wide = _sizes(call, table), jnp.dtype(call.dtype or dtype)
    shapes = {}
    for row in table:
        if row.name == "segment_ids":
            if call.segment_ids is not None:
                if call.segment_ids > sizes["q_len"]:
                    raise ConfigError(
                        f"call.segment_ids={call.segment_ids} segments in {sizes['q_len']} tokens; wanted at most one per token."
                    )
                shapes[row.name] = jax.ShapeDtypeStruct(row.shape(sizes, call.layout), jnp.dtype(jnp.int32))
        elif not row.optional or row.name in (call.operands or {}):
            given = (call.operands or {}).get(row.name, True)
            shape = row.shape(sizes, call.layout) if given is True else tuple(given)
            if row.accepted(shape, sizes, call.layout) is None:
                raise ConfigError(
                    f"call.operands.{row.name}={list(shape)}; wanted {row.expected_shapes(sizes, call.layout)}."
                )
            shapes[row.name] = jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32) if row.dtype == "integers" else wide)
    if is_step(table):
        shapes["state"] = jax.ShapeDtypeStruct(shapes["state"].shape, jnp.dtype(state_dtype or wide))
        integers = jnp.dtype(jnp.int32)
        shapes |= {name: jax.ShapeDtypeStruct(shape, integers) for name, shape in batch_shapes(sizes).items()}
    return shapes


def _sizes(call: CallDeclaration, table: OperandTable) -> dict[str, int]:
    """The size of each dim of the table. Errors: ConfigError for missing ones, and for what the operation doesn't have."""
    # A convolution of a step has sizes of its own, if it is declared.
    used = [row for row in table if not row.name.endswith(CONV_ROWS) or row.name in (call.operands or {})]
    every, step = {dim for row in used for dim in row.dims_in("bthd") if dim}, is_step(table)
    of_call = _OF_STEP if step else _OF_CALL
    every |= {"rows", *_OF_BATCH} if step else set()
    for name in call.operands or {}:
        if name not in table or not table[name].optional or name == "segment_ids":
            known = [row.name for row in table if row.optional and row.name != "segment_ids"]
            raise ConfigError(f"call.operands has {name!r}; wanted some of {', '.join(known)}." + nearest(name, known))
    for name in call.dims or {}:
        own = sorted(every - {*of_call, "history"})
        if name not in own:
            raise ConfigError(f"call.dims has {name!r}; wanted {', '.join(own) or 'none for this operation'}.")
    given = {dim: getattr(call, _FIELDS.get(dim, dim)) for dim in of_call} | dict(call.dims or {})
    for dim in of_call:
        if dim not in every and dim != "batch" and call.is_set(_FIELDS.get(dim, dim)):
            raise ConfigError(f"call.{_FIELDS.get(dim, dim)}: the operation has no such dim; leave it out.")
    for dim, same in (("kv_heads", "heads"), ("value_dim", "head_dim")):
        given[dim] = given[same] if given[dim] is None else given[dim]
    if "width" in given:
        if given["width"] < 2:
            raise ConfigError(f"call.dims.width={given['width']}; wanted at least 2 tokens, as in a call.")
        given["history"] = given["width"] - 1
    given = step_sizes(given) if step else given
    if missing := sorted(dim for dim in every if given.get(dim) is None and dim not in _OF_BATCH):
        fields = [f"call.{_FIELDS.get(dim, dim)}" if dim in of_call else f"call.dims.{dim}" for dim in missing]
        raise ConfigError(f"{', '.join(fields)} missing; declare it.")
    if step and call.is_set("layout"):
        raise ConfigError("call.layout: a step's tokens are [tokens, ...]; leave it out.")
    if call.layout == "thd" and not step and given["batch"] != 1:
        raise ConfigError(f"call.batch={given['batch']} with layout 'thd', which has no batch; leave call.batch out.")
    return {dim: size for dim, size in given.items() if size is not None or dim == "shards"}


def recurrent_arrays(
    call: CallDeclaration, seed: int, dtype: str, table: OperandTable, state_dtype: str | None
) -> dict[str, np.ndarray]:
    """Random arrays of these shapes, of the size that a model's have: decays at most 0, keys of norm 1. The same seed gives the
    same arrays."""
    random, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, struct in recurrent_shapes(call, dtype, table, state_dtype).items():
        if name in table:
            arrays[name] = _drawn(random, table[name], struct, call).astype(struct.dtype)
    return arrays | (drawn_batch(random, _sizes(call, table), call) if is_step(table) else {})


def _drawn(
    random: np.random.Generator, row: Operand, struct: jax.ShapeDtypeStruct, call: CallDeclaration
) -> np.ndarray:
    if row.name == "segment_ids":
        return segments(random, struct.shape, call.segment_ids or 1)
    if row.name == "lengths":
        return random.integers(1, call.q_len or 1, struct.shape, endpoint=True)
    normal = random.standard_normal(struct.shape, np.float32)
    match row.name:
        case "key":
            return normal / np.linalg.norm(normal, axis=-1, keepdims=True)
        case "decay":
            return -np.exp(normal - 2)
        case "A":
            return -np.exp(normal)
        case "dt":
            return np.exp(normal - 2)
        case "beta":
            return 1 / (1 + np.exp(-normal))
    if row.name.endswith("weight"):
        return normal / np.sqrt(np.float32(struct.shape[0]))
    return normal


def recurrent_arguments(
    call: CallDeclaration, arrays: Mapping[str, Any], mode: str | None, table: OperandTable
) -> dict[str, Any]:
    """The keyword arguments of the call for these arrays. `mode` overrides the declared one."""
    mode = call.mode if mode is None else mode
    options: dict[str, Any] = {} if is_step(table) else {"layout": call.layout}
    if mode is not None:
        options["mode"] = mode
    if is_step(table) and (mode or "").strip("_") in ("autoregressive", "decode"):
        options["max_q_len"] = (call.dims or {}).get("columns", 1)
    return {**arrays, **options}
