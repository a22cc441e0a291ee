"""Masks as fields of pydantic models. Pydantic is imported when it asks for their schema, or somebody for the JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy import LazyModule, LazySerializer
from .algebra import Mask

if TYPE_CHECKING:
    from . import schema
else:
    schema = LazyModule("attnops.masks.schema")

__all__ = ["mask_json_schema"]


def mask_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the input of `mask_from_dict`; recursive through $defs."""
    return schema.mask_json_schema()


Mask.__get_pydantic_core_schema__ = staticmethod(lambda source, handler: schema.field_schema(source, handler))
Mask.__pydantic_serializer__ = LazySerializer(Mask)
