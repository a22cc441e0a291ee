"""JSON Schema of the config file, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from ..errors import AttnOpsError
from .declaration import Declaration
from .metadata import OperationMetadata
from .metadata_field import metadata_json_schema
from .registry import OperationRegistry

__all__ = ["config_json_schema", "declaration_json_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_json_schema(operation: str) -> dict[str, Any]:
    """JSON Schema of one operation's config. Errors: UnknownNameError."""
    return {"$schema": _DIALECT, **OperationRegistry.get(operation).config.model_json_schema()}


def declaration_json_schema(operation: str | None = None) -> dict[str, Any]:
    """JSON Schema (2020-12) of the declaration, with the configs of all operations, or only of the given one.

    An operation that can't be imported gets no schema of its own; this doesn't affect the others.
    """
    schema = Declaration.model_json_schema(by_alias=True)
    definitions = schema.setdefault("$defs", {})
    names = OperationRegistry.names() if operation is None else (operation,)
    configs: dict[str, Any] = {}
    for name in names:
        try:
            config_schema = OperationRegistry.get(name).config.model_json_schema(
                ref_template=f"#/$defs/{name}.{{model}}"
            )
        except AttnOpsError:
            if operation is not None:
                raise
            configs[name] = {"type": "object", "description": "This operation can't be imported here."}
            continue
        definitions |= {f"{name}.{model}": body for model, body in config_schema.pop("$defs", {}).items()}
        definitions[f"config.{name}"] = config_schema
        configs[name] = {"$ref": f"#/$defs/config.{name}"}
    definitions["metadata"] = metadata_json_schema(OperationMetadata, configs)
    schema["properties"]["metadata"] = {"$ref": "#/$defs/metadata"}
    schema["properties"]["operation"] = {"enum": list(names), "description": "The operation that runs."}
    return {"$schema": _DIALECT, **schema}
