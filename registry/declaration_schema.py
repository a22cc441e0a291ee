"""JSON Schema of the config file, so that editors complete and check it."""

from __future__ import annotations

import dataclasses
from typing import Any

from eformer.escale import PartitionAxis

from ..errors import AttnOpsError
from .operation import METHODS
from .registry import OperationRegistry
from .sequence import RING_ORDERS, STRATEGIES

__all__ = ["config_json_schema", "declaration_json_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_FLOAT = {"enum": ["float32", "bfloat16", "float16", "float64"]}
_BLOCK = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
_AXES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_MESH = {
    "description": "{axis: size}, or axis_names, axis_sizes, axis_types, platform, device_kind.",
    "anyOf": [{"type": "object"}, {"type": "null"}],
}


def config_json_schema(operation: str) -> dict[str, Any]:
    """JSON Schema of one operation's config. Errors: UnknownNameError."""
    return {"$schema": _DIALECT, **OperationRegistry.get(operation).config.model_json_schema()}


def declaration_json_schema(operation: str | None = None) -> dict[str, Any]:
    """JSON Schema (2020-12) of the declaration, with the configs of all operations, or of the one given.

    An operation that can't be imported gets no schema of its own; the others are not touched by that.
    """
    from .declaration import Declaration

    schema = Declaration.model_json_schema(by_alias=True)
    definitions = schema.setdefault("$defs", {})
    names = OperationRegistry.names() if operation is None else (operation,)
    configs: dict[str, Any] = {}
    for name in names:
        try:
            own = OperationRegistry.get(name).config.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        except AttnOpsError:
            if operation is not None:
                raise
            configs[name] = {"type": "object", "description": "This operation can't be imported here."}
            continue
        definitions |= {f"{name}.{model}": body for model, body in own.pop("$defs", {}).items()}
        definitions[f"config.{name}"] = own
        configs[name] = {"$ref": f"#/$defs/config.{name}"}
    definitions["metadata"] = _metadata(configs)
    schema["properties"]["metadata"] = {"$ref": "#/$defs/metadata"}
    schema["properties"]["operation"] = {"enum": list(names), "description": "The operation that runs."}
    return {"$schema": _DIALECT, **schema}


def _metadata(configs: dict[str, Any]) -> dict[str, Any]:
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
