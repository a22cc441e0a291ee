"""CallDeclaration: a declaration of one attention call: sizes, mask, options, and the shapes of traced inputs.

An omitted field is unset, which differs from null: an unset field accepts what an inputs file has, null refuses it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ConfigDict, Field, StrictBool, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from ..errors import ConfigError, is_whole, nearest, shown
from ..masks import Mask
from ..masks.checks import LIMIT
from ..planning.quantised import quantise, scale_shape
from ..planning.score_operands import capture_sizes, captured_names, held_captures, with_captures
from ..planning.unset_fields import UnsetFieldsModel
from ..scores import Score
from ..sharding import ATTENTION, MODES, Operand, OperandTable, canonical_mode
from .drawn_integers import distinct_places, segments

__all__ = ["DECLARED_BY", "CallDeclaration", "Size"]

Size = Annotated[int, Field(strict=True, ge=1, le=LIMIT)]
_Distance = Annotated[int, Field(strict=True, ge=0, le=LIMIT)]
_Offset = Annotated[int, Field(strict=True, ge=-LIMIT, le=LIMIT)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
InputDtype = Literal["float32", "bfloat16", "float16"]
_SHAPES = {"bias": (4, 4), "dense_mask": (4, 4), "softmax_aux": (1, 2)}
_SIZES = ("batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim", "value_dim")


DECLARED_BY = {
    "mask": "dense_mask",
    "bias": "bias",
    "softmax_aux": "softmax_aux",
    "key_scale": "kv_scales",
    "value_scale": "kv_scales",
    "q_segment_ids": "segment_ids",
    "kv_segment_ids": "segment_ids",
    "kv_lengths": "kv_lengths",
    "kv_starts": "kv_starts",
    "query_offset": "query_offset",
}
"""The argument of a call that is an array -> the field that declares it."""


class CallDeclaration(UnsetFieldsModel):
    """The call. Sizes count elements; `kv_len`, `kv_heads` and `value_dim` default to those of the query."""

    model_config = ConfigDict(title="call")

    batch: Size = 1
    q_len: Size | None = None
    kv_len: Size | None = None
    q_heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    value_dim: Size | None = None
    dtype: Annotated[
        InputDtype | None,
        Field(description="Dtype of query, key and value; null: metadata.runtime_dtype, else float32."),
    ] = None
    layout: Literal["bthd", "bhtd", "thd"] = "bthd"
    mode: Annotated[str | None, Field(json_schema_extra={"examples": [m.strip("_") for m in MODES]})] = None
    mask: Mask | None = None
    score: Score | None = None
    causal: StrictBool | None = None
    sliding_window: _Distance | tuple[_Distance | None, _Distance | None] | None = None
    query_offset: _Offset | None = None
    softmax_scale: _Number | None = None
    logits_soft_cap: Annotated[_Number, Field(gt=0)] | None = None
    dropout_prob: Annotated[_Number, Field(ge=0, lt=1)] | None = None
    deterministic: StrictBool = True
    return_weights: StrictBool = False
    return_lse: StrictBool = False
    segment_ids: Annotated[Size | None, Field(description="Number of packed segments in each row.")] = None
    kv_lengths: Annotated[
        tuple[_Distance, ...] | Literal[True] | None,
        Field(description="Number of keys of each batch row, or true for random numbers."),
    ] = None
    kv_starts: Annotated[
        tuple[_Distance, ...] | Literal[True] | None,
        Field(description="First visible key of each batch row, or true for random ones."),
    ] = None
    bias: Annotated[tuple[Size, ...] | None, Field(description="Shape, broadcasts to [batch, heads, q, kv].")] = None
    softmax_aux: Annotated[tuple[Size, ...] | None, Field(description="Shape of the sinks.")] = None
    dense_mask: Annotated[tuple[Size, ...] | None, Field(description="Shape, broadcasts to [batch, heads, q, kv].")] = (
        None
    )

    operands: Annotated[
        dict[str, Literal[True] | tuple[Size, ...]] | None,
        Field(
            description="Arrays of the score, or of an operation of your own, by name: their shape, or true for the table's."
        ),
    ] = None
    dims: dict[str, Size] | None = None  # that only a recurrent operation has: channels, state_dim, width
    kv_dtype: Annotated[
        Literal["int8", "float8_e4m3fn", "float8_e5m2"] | None,
        Field(description="Dtype of a quantised key and value; null: dtype."),
    ] = None
    kv_scales: Annotated[
        Literal["tensor", "head", "token", "token_head"] | None,
        Field(description="What has its own scale; null: fp8 without scales. Only with kv_dtype."),
    ] = "token_head"

    @model_validator(mode="after")
    def _scales_of_something(self) -> Self:
        if self.kv_dtype is None and self.kv_scales is not None and self.is_set("kv_scales"):
            raise ValueError(
                f"call.kv_scales={shown(self.kv_scales)} without call.kv_dtype; declare it, or leave kv_scales out"
            )
        if self.kv_dtype == "int8" and self.kv_scales is None:
            raise ValueError("call.kv_scales=None with call.kv_dtype='int8', which needs scales; leave kv_scales out")
        return self

    @field_validator("mode", mode="after")
    @classmethod
    def _known_mode(cls, value: str | None) -> str | None:
        if value is not None:
            canonical_mode(value)
        return value

    @field_validator("sliding_window", mode="before")
    @classmethod
    def _window(cls, value: Any) -> Any:
        sides = value if isinstance(value, list | tuple) else [value]
        right = len(sides) == (2 if isinstance(value, list | tuple) else 1)
        if not right or not all(side is None or is_whole(side, 0, LIMIT) for side in sides):
            raise ValueError(
                f"call.sliding_window={shown(value)}; wanted a distance, or [left, right] with null for no bound"
            )
        return value

    @field_validator("kv_lengths", "kv_starts", mode="before")
    @classmethod
    def _lengths(cls, value: Any, info: ValidationInfo) -> Any:
        if (
            value is None
            or value is True
            or (isinstance(value, list | tuple) and all(is_whole(n, 0, LIMIT) for n in value))
        ):
            return value
        what = "lengths" if info.field_name == "kv_lengths" else "starts"
        raise ValueError(
            f"call.{info.field_name}={shown(value)}; wanted a list of {what}, one per batch row, or true for random ones"
        )

    @field_validator(*_SHAPES, mode="before")
    @classmethod
    def _shape(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        low, high = _SHAPES[name]
        if value is None or (
            isinstance(value, list | tuple) and low <= len(value) <= high and all(is_whole(n, 1, LIMIT) for n in value)
        ):
            return value
        count = f"{low}" if low == high else f"{low} or {high}"
        raise ValueError(f"call.{name}={shown(value)}; wanted a shape: a list of {count} positive integers")

    def sizes(self) -> dict[str, int]:
        """All sizes by field name. Errors: ConfigError for omitted sizes, and those of `checked`."""
        self.checked()
        if self.dims is not None:
            raise ConfigError(f"call.dims={shown(dict(self.dims))}: for recurrent operations; leave it out.")
        missing = [name for name in ("q_len", "q_heads", "head_dim") if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"{', '.join('call.' + m for m in missing)} missing; declare it, or give an inputs file.")
        sizes = {name: getattr(self, name) for name in _SIZES}
        for name, same in (("kv_len", "q_len"), ("kv_heads", "q_heads"), ("value_dim", "head_dim")):
            sizes[name] = sizes[same] if sizes[name] is None else sizes[name]
        if self.layout == "thd" and sizes["batch"] != 1:
            raise ConfigError(
                f"call.batch={sizes['batch']} with layout 'thd', which has no batch; leave call.batch out."
            )
        return sizes

    def shapes(self, dtype: str = "float32", table: OperandTable = ATTENTION) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of all arrays of the call, by argument name. `dtype`: that of query, key and value if none is declared.
        table: the operation's operands."""
        n, input_dtype = self.sizes(), jnp.dtype(self.dtype or dtype)
        dims, kv_dtype = (
            {**n, "heads": n["q_heads"]},
            input_dtype if self.kv_dtype is None else jnp.dtype(self.kv_dtype),
        )

        def of(operand: Operand, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(operand.shape(dims, self.layout), dtype)

        shapes = {x.name: of(x, kv_dtype if x.dtype == "stored" else input_dtype) for x in ATTENTION.required}
        if self.kv_dtype is not None and self.kv_scales is not None:
            for name in ("key", "value"):
                shape = scale_shape(shapes[name].shape, self.kv_scales, self.layout)
                shapes[f"{name}_scale"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        if self.segment_ids is not None:
            shortest = min(n["q_len"], n["kv_len"])
            if self.segment_ids > shortest:
                raise ConfigError(
                    f"call.segment_ids={self.segment_ids} segments in {shortest} tokens; wanted at most one per token."
                )
            shapes |= {name: of(ATTENTION[name], jnp.int32) for name in ("q_segment_ids", "kv_segment_ids")}
        for name in ("kv_lengths", "kv_starts"):
            numbers = getattr(self, name)
            if numbers is None:
                continue
            if numbers is not True and len(numbers) != n["batch"]:
                raise ConfigError(f"call.{name} has {len(numbers)} numbers; wanted one per batch row, {n['batch']}.")
            if numbers is not True and max(numbers) > n["kv_len"]:
                raise ConfigError(
                    f"call.{name} holds {max(numbers)}; wanted 0 to {n['kv_len']}, the number of keys in call.kv_len: count the "
                    "keys of each row that are written."
                )
            shapes[name] = of(ATTENTION[name], jnp.int32)
        if self.dense_mask is not None:
            shapes["mask"] = jax.ShapeDtypeStruct(tuple(self.dense_mask), jnp.bool_)
        for name in ("bias", "softmax_aux"):
            shape = getattr(self, name)
            if shape is not None:
                shapes[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
        declared_shapes = {**dict.fromkeys(self.captures(), True), **(self.operands or {})}
        table = self.with_captures(table)
        if self.score is not None:
            dims |= capture_sizes(self.score, n["kv_len"])
        for name, declared in declared_shapes.items():
            row = table.get(name)
            if row is None or name in ATTENTION:
                further = [x for x in table.names if x not in ATTENTION]
                raise ConfigError(
                    f"call.operands has {shown(name)}; the score and the operation have the operands: "
                    f"{', '.join(further) or 'none'}.{nearest(name, further)}"
                )
            dtype_of = jnp.int32 if row.dtype == "integers" else jnp.float32
            shapes[name] = of(row, dtype_of) if declared is True else jax.ShapeDtypeStruct(declared, dtype_of)
        if not self.deterministic:
            shapes["dropout_rng"] = jax.ShapeDtypeStruct((2,), jnp.uint32)
        return shapes

    def captures(self) -> tuple[str, ...]:
        """The score's arrays that a call has to pass: those that it neither holds nor has by the number of heads."""
        if self.score is None:
            return ()
        held = held_captures(self.score, 1)
        return tuple(name for name in captured_names(self.score) if name not in held)

    def with_captures(self, table: OperandTable) -> OperandTable:
        """A table with the rows of the declared score's arrays."""
        shapes = {name: shape for name, shape in (self.operands or {}).items() if shape is not True}
        return with_captures(table, self.score, shapes)

    def draw(self, seed: int, dtype: str = "float32", table: OperandTable = ATTENTION) -> dict[str, np.ndarray]:
        """Random arrays of these shapes: normally distributed numbers, sorted segment ids from 1, lengths up to kv_len.

        Quantised keys and values are such numbers divided by their scales. If the queries are at the end of a cache, lengths
        are at least the number of queries. The same seed gives the same arrays.
        """
        random, arrays = np.random.default_rng(seed), {}
        n = self.sizes()
        for name, struct in self.shapes(dtype, table).items():
            if name == "dropout_rng":
                arrays[name] = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
            elif name == "kv_lengths":
                low = n["q_len"] if n["q_len"] < n["kv_len"] else 1
                drawn = random.integers(low, n["kv_len"], n["batch"], endpoint=True)
                arrays[name] = np.asarray(drawn if self.kv_lengths is True else self.kv_lengths, np.int32)
            elif name == "kv_starts":  # every row keeps a key, unless the lengths leave none
                lengths = arrays["kv_lengths"] if "kv_lengths" in arrays else np.full(n["batch"], n["kv_len"])
                drawn = random.integers(0, np.maximum(lengths - n["q_len"], 0), n["batch"], endpoint=True)
                arrays[name] = np.asarray(drawn if self.kv_starts is True else self.kv_starts, np.int32)
            elif name == "kv_segment_ids" and n["q_len"] == n["kv_len"]:
                arrays[name] = arrays["q_segment_ids"]
            elif name.endswith("segment_ids"):
                arrays[name] = segments(random, struct.shape, self.segment_ids or 1)
            elif name in ("key", "value") and self.kv_dtype is not None and self.kv_scales is not None:
                drawn = random.standard_normal(struct.shape, np.float32)
                arrays[name], scale = quantise(drawn, self.kv_dtype, self.kv_scales, self.layout)
                arrays[f"{name}_scale"] = scale
            elif name in arrays:  # a scale, drawn with its tensor
                continue
            elif name == "mask":
                arrays[name] = random.random(struct.shape) < 0.7
            elif name in table and table[name].indexes == "kv_len":
                arrays[name] = distinct_places(random, struct.shape, n["kv_len"])
            elif struct.dtype == jnp.int32:
                arrays[name] = np.zeros(struct.shape, np.int32)
            else:
                arrays[name] = random.standard_normal(struct.shape, np.float32).astype(struct.dtype)
        return arrays
