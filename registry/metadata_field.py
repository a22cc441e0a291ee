"""OperationMetadata as a field of a pydantic model, and its JSON Schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eformer.escale import PartitionAxis
from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticSerializationUnexpectedValue, core_schema

from ..errors import AttnOpsError
from ..planning.operation import METHODS
from ..planning.sequence.split import RING_ORDERS, STRATEGIES
from .registry import OperationRegistry

if TYPE_CHECKING:
    from .metadata import OperationMetadata

__all__ = ["field_json_schema", "field_schema", "metadata_json_schema"]

_FLOAT = {"enum": ["float32", "bfloat16", "float16", "float64"]}
_BLOCK = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
_AXES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_MESH = {
    "description": "{axis: size}, or axis_names, axis_sizes, axis_types, platform, device_kind.",
    "anyOf": [{"type": "object"}, {"type": "null"}],
}


def field_schema(wanted: type[OperationMetadata]) -> CoreSchema:
    """Takes metadata, or a dict as `to_dict` writes it; is written as that dict, whole, whatever is asked of the model."""

    def read(value: Any) -> OperationMetadata:
        if isinstance(value, wanted):
            return value  # immutable, and checked when it was made
        try:
            return wanted.from_dict(value)
        except AttnOpsError as error:  # some of which are no ValueError, as pydantic wants it
            raise ValueError(str(error)) from None

    def write(value: Any) -> dict[str, Any]:
        if not isinstance(value, wanted):  # one branch of a union after the other is tried
            raise PydanticSerializationUnexpectedValue(f"a {type(value).__name__} is no {wanted.__name__}")
        return value.to_dict()

    return core_schema.no_info_plain_validator_function(
        read, serialization=core_schema.plain_serializer_function_ser_schema(write)
    )


def field_json_schema(handler: GetJsonSchemaHandler) -> dict[str, Any]:
    """JSON Schema of such a field, with the configs of all operations that can be imported here."""
    configs = OperationRegistry.configs()
    return metadata_json_schema({name: handler(config.__pydantic_core_schema__) for name, config in configs.items()})


def metadata_json_schema(configs: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema of the dict that OperationMetadata.from_dict takes, around those of the operations' configs."""
    axes = {field.name: _AXES for field in dataclasses.fields(PartitionAxis)}
    platform = {"enum": [*METHODS, None]}
    fields: dict[str, Any] = {
        "schema_version": {"const": 1},
        "runtime_dtype": {"enum": [*_FLOAT["enum"], None], "description": "null keeps the query's dtype."},
        "runtime_softmax_dtype": _FLOAT,
        "sequence_axis_name": {"type": "string"},
        "platform": platform,
        "backend": platform,
        "partition_axis": {"type": "object", "properties": axes, "additionalProperties": False},
        "operation_configs": {"type": "object", "properties": configs, "additionalProperties": False},
        "mesh": _MESH,
        "softmax_scale": {"type": ["number", "null"]},
        "dropout_prob": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "causal": {"type": "boolean"},
        "scan_ring_attention": {"type": ["boolean", "null"]},
        "blocksize_q": _BLOCK,
        "blocksize_k": _BLOCK,
        "blocksize_b": _BLOCK,
        "fallback": {"enum": ["warn", "error", "allow"]},
        "kv_heads": {"enum": ["replicate", "error"]},
        "strict": {"type": "boolean"},
        "tuning": {"enum": ["heuristic", "tune", "error", "off"]},
        "sequence_parallel": {"enum": [*STRATEGIES]},
        "ring_order": {"enum": [*RING_ORDERS, None]},
    }
    return {"type": "object", "properties": fields, "additionalProperties": False}
