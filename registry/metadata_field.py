"""OperationMetadata as a field of a pydantic model, and its JSON Schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from ..errors import AttnOpsError
from ..planning.policy import CHOICES
from ..pydantic_fields import value_schema
from .registry import OperationRegistry

__all__ = ["field_json_schema", "field_schema", "metadata_json_schema"]


def field_schema(metadata_type: type[Any]) -> CoreSchema:
    """The schema of a pydantic field. It accepts metadata or the dict of `to_dict`, and always writes that whole dict."""

    def read(value: Any) -> Any:
        if isinstance(value, metadata_type):
            return value  # immutable, and checked when it was created
        try:
            return metadata_type.from_dict(value)
        except AttnOpsError as error:  # pydantic requires a ValueError, which not all of these are
            raise ValueError(str(error)) from None

    return value_schema(metadata_type, f"a {metadata_type.__name__}", read, lambda value: value.to_dict())


def field_json_schema(metadata_type: type[Any], handler: GetJsonSchemaHandler) -> dict[str, Any]:
    """JSON Schema of the field, with the configs of all operations that can be imported here."""
    configs = OperationRegistry.configs()
    schemas = {name: handler(config.__pydantic_core_schema__) for name, config in configs.items()}
    return metadata_json_schema(metadata_type, schemas)


def metadata_json_schema(metadata_type: type[Any], configs: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema of the input of `metadata_type.from_dict`, including those of the operations' configs."""
    fields: dict[str, Any] = {"schema_version": {"const": 1}}
    for field in dataclasses.fields(metadata_type):
        kind = field.metadata.get("kind")
        if kind or field.name in CHOICES:
            schema = kind.schema if kind else {"enum": [*CHOICES[field.name]]}
            fields[field.name] = {**schema, "description": field.metadata["doc"]}
    fields["operation_configs"]["properties"] = configs
    return {"type": "object", "properties": fields, "additionalProperties": False}
