"""Attention: a declaration from a file or from keywords, ready for a model to call."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

import jax.numpy as jnp
from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, PydanticSerializationUnexpectedValue, core_schema

from ..drawing.html import code, fragment, heading, pictures, rows
from ..errors import AttnOpsError, ConfigError, InputError, shown
from ..masks import Dense, Mask
from ..planning import Plan
from ..planning.call_arguments import CALL_OPTIONS, CallArguments, CallArray
from ..registry import OperationMetadata, OperationRegistry
from ..registry.declaration import Declaration
from ..registry.kinds import short_axes
from ..sharding import canonical_layout, canonical_mode
from .arguments import check_names, takes_call_arguments
from .arrays import is_array, shaped
from .attention_keywords import given
from .base import Operation
from .output import AttentionOutput

__all__ = ["Attention"]

# Arrays that a file declares by shape and a call must pass.
_DECLARED_ARRAYS = {
    "segment_ids": "q_segment_ids", "kv_lengths": "kv_lengths", "kv_starts": "kv_starts", "bias": "bias",
    "softmax_aux": "softmax_aux", "dense_mask": "mask",
}  # fmt: skip
_SCALES = ("key_scale", "value_scale")
_HEADS_AND_DIMS = {
    "q_heads": ("query", "h"),
    "kv_heads": ("key", "h"),
    "head_dim": ("query", "d"),
    "value_dim": ("value", "d"),
}
_KEPT_PLANS = 64


class Attention:
    """A declared attention: an operation with the options of its calls. Hashable, so it can be a static argument of jit.

    declared: an operation's name; or a Declaration, its dict, or the path of its JSON file. keywords: with a name, whatever is
    the same in all calls (mask, causal, sliding_window and the other static arguments of a call), fields of OperationMetadata
    (or `metadata`, a whole one) and fields of the operation's config, such as block_q. With a declaration, fields of
    OperationMetadata that replace its own, such as a mesh that the program has made.

    What a call passes besides its arrays is combined with the declaration: masks intersect; an option given in both must be
    equal. Heads, dims and dtypes that a file declares are checked; its batch and lengths are only for `attnops plan`. Errors:
    ConfigError for a declaration that is disabled or disagrees with a call; InputTypeError for unknown keywords; InputError for
    declared arrays that are missing.
    """

    def __init__(self, declared: Declaration | Mapping[str, Any] | str | Path, **keywords: Any) -> None:
        self.declaration, metadata, self._stated = given(declared, keywords)
        name = self.declaration.operation
        operation: Any = OperationRegistry.get(name)
        if not issubclass(operation, Operation):
            raise ConfigError(
                f"operation {name!r} has steps over a cache's pages and no calls; make it with "
                f"OperationRegistry.create({name!r}, metadata)."
            )
        self.operation: Operation = operation(metadata)
        self._plans: dict[Plan, Plan] = {}
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """The file's value: whether attnops runs or, in an adapter, the framework's own attention."""
        return self.declaration.enabled

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The distinct plans of the calls so far, in order (at most 64); under jit, those of the traces."""
        with self._lock:
            return tuple(self._plans.values())

    def states(self, field: str) -> bool:
        """Whether the file or the program specifies a field of the metadata, so that its value isn't just a default."""
        return field in self._stated

    @takes_call_arguments
    def __call__(
        self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]
    ) -> AttentionOutput:
        """Attend; `call` is what Operation.__call__ takes."""
        return self.run((), query, key, value, **call)

    def run(
        self,
        remarks: tuple[str, ...],
        query: CallArray,
        key: CallArray,
        value: CallArray,
        **call: Unpack[CallArguments],
    ) -> AttentionOutput:
        """Like a call. `remarks` are added to the notes of its plan in `plans`: what an adapter made of its arguments."""
        options = self.options(query, key, value, **call)
        output = self.operation(query, key, value, **options)
        decided = output.plan
        assert decided is not None  # the call itself sets it
        with self._lock:
            new = decided not in self._plans and len(self._plans) < _KEPT_PLANS
        if new:  # with array masks, plan again: plan() also looks at their values
            noted = self.operation.plan(query, key, value, **options) if decided.problem.leaves else decided
            with self._lock:
                self._plans[decided] = replace(noted, notes=(*noted.notes, *remarks)) if remarks else noted
        return output

    @takes_call_arguments
    def plan(self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]) -> Plan:
        """The plan of the same call, from arrays or ShapeDtypeStructs; nothing runs."""
        return self.operation.plan(query, key, value, **self.options(query, key, value, **call))

    @takes_call_arguments
    def explain(self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]) -> str:
        """The plan of the same call as text."""
        return self.plan(query, key, value, **call).explain()

    @takes_call_arguments
    def options(
        self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]
    ) -> dict[str, Any]:
        """The call's options combined with the declared ones."""
        check_names(call, self.operation.operands.names)
        declared = self.declaration.call
        if not self.enabled:
            raise ConfigError(
                f"this declaration of {self.declaration.operation!r} has enabled=false, which selects a framework's own "
                "attention, but there is none here; call that one, or remove 'enabled' from the file."
            )
        found: dict[str, Any] = {**call}
        for name in CALL_OPTIONS:
            said, told = getattr(declared, name), found.get(name)
            if not declared.is_set(name) or said is None:
                continue
            if told is not None and (is_array(told) or _plain(name, told) != _plain(name, said)):
                raise ConfigError(
                    f"{name}: the declaration says {shown(said)}, the call says {shown(told)}; leave one of them out."
                )
            found[name] = said
        wanted = {argument: name for name, argument in _DECLARED_ARRAYS.items() if getattr(declared, name) is not None}
        if declared.kv_dtype is not None and declared.kv_scales is not None:
            wanted |= dict.fromkeys(_SCALES, "kv_scales")
        wanted |= {name: f"operands.{name}" for name in declared.operands or {}}
        for argument, name in wanted.items():
            if found.get(argument) is None:
                raise InputError(
                    f"call.{name} is declared, but the call has no {argument}; pass it, or leave {name} out."
                )
        if declared.mask is not None:
            found["mask"] = _both(declared.mask, found.get("mask"))
        if is_array(found.get("mask")) and found.get("causal") is None and self.states("causal"):
            found["causal"] = self.operation.metadata.causal  # declared, so not just a default
        # The operation refuses what isn't an array.
        arrays = {n: x for n, x in (("query", query), ("key", key), ("value", value)) if is_array(x)}
        layout = found.get("layout")
        self._check_sizes(arrays, "bthd" if layout is None else canonical_layout(layout))
        self._check_dtypes(arrays)
        return found

    def _check_sizes(self, arrays: Mapping[str, Any], layout: str) -> None:
        for field, (name, axis) in _HEADS_AND_DIMS.items():
            said, shape = getattr(self.declaration.call, field), arrays[name].shape if name in arrays else ()
            if said is not None and len(shape) == len(layout) and shape[layout.index(axis)] != said:
                raise InputError(
                    f"{name} {tuple(shape)} has {shape[layout.index(axis)]} in {axis!r} of layout {layout!r}; the file "
                    f"declares {field}={said}."
                )

    def _check_dtypes(self, arrays: Mapping[str, Any]) -> None:
        declared = self.declaration.call
        for name, array in arrays.items():
            quantised = declared.kv_dtype is not None and name != "query"
            field = "kv_dtype" if quantised else "dtype"
            dtype = shaped(name, array).dtype
            wanted = getattr(declared, field)
            if wanted is not None and dtype != jnp.dtype(wanted):
                raise InputError(
                    f"{name} is {dtype}; the file declares call.{field}={wanted!r}. Cast it, or "
                    f"leave {field} out; metadata.runtime_dtype declares the dtype to compute in."
                )

    def _key(self) -> tuple[Any, ...]:
        # In an adapter a specified causal or dropout_prob is more than a default of the same value.
        stated = self._stated & {"causal", "dropout_prob"}
        return self.declaration.operation, self.operation.metadata, self.declaration.call, self.enabled, stated

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Attention) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def declared(self) -> Declaration:
        """The declaration with what the program specified in its place; an Attention of it equals this one."""
        unsaid = OperationMetadata().to_dict()
        metadata = {
            name: value
            for name, value in self.operation.metadata.to_dict().items()
            if name != "schema_version" and (name in self._stated or value != unsaid[name])
        }
        return self.declaration.model_copy(update={"metadata": metadata}).checked()

    def __reduce__(self) -> Any:
        return type(self), (self.declared().to_dict(),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Self], handler: GetCoreSchemaHandler) -> CoreSchema:
        declaration = handler.generate_schema(Declaration)

        def read(value: Any) -> Attention:
            if isinstance(value, cls):
                return value
            if not isinstance(value, Declaration | Mapping):
                raise ConfigError(
                    f"got {type(value).__name__}; wanted an Attention, a Declaration, or an object of its fields."
                )
            try:
                return cls(value)
            except AttnOpsError as error:  # some aren't a ValueError, which pydantic requires
                raise ValueError(str(error)) from None

        def write(value: Any) -> Declaration:
            if not isinstance(value, cls):  # pydantic tries the branches of a union in turn
                raise PydanticSerializationUnexpectedValue(f"a {type(value).__name__} isn't a {cls.__name__}")
            return value.declared()

        return core_schema.no_info_plain_validator_function(
            read,
            json_schema_input_schema=declaration,
            serialization=core_schema.plain_serializer_function_ser_schema(write, return_schema=declaration),
        )

    def __repr__(self) -> str:
        data = self.declared().to_dict()
        del data["schema_version"]
        if "partition_axis" in data.get("metadata", {}):
            data["metadata"]["partition_axis"] = short_axes(data["metadata"]["partition_axis"])
        return f"Attention({json.dumps(data, allow_nan=False)})"

    def _repr_html_(self) -> str:
        mask = self.declaration.call.mask
        plans = [("plan", f"{p.implementation or 'refused'}: {p.problem.describe()}") for p in self.plans]
        drawn = [] if mask is None else [pictures([mask.draw().svg()])]
        return fragment([heading("Attention"), code(self.declared().to_json()), *drawn, rows(plans)])


# For when pydantic looks at the value instead of the field's type (Any, serialize_as_any).
Attention.__pydantic_serializer__ = TypeAdapter(Attention).serializer  # type: ignore[attr-defined]


def _both(declared: Mask, told: Any) -> Mask:
    if told is None:
        return declared
    return declared & (told if isinstance(told, Mask) else Dense(told))


def _plain(name: str, value: Any) -> Any:
    """One form for equivalent values: [3, 0] and (3, 0), 3 and (3, 3), 'train' and '__train__'."""
    if name == "mode":
        return canonical_mode(value)
    if name == "sliding_window":
        return tuple(value) if isinstance(value, list | tuple) else (value, value)
    return value
