"""Scores as fields of pydantic models. Pydantic is imported when it asks for their schema, or somebody for the JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy import LazyModule, LazySerializer
from .node import Score

if TYPE_CHECKING:
    from . import schema
else:
    schema = LazyModule("attnops.scores.schema")

__all__ = ["score_json_schema"]


def score_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the input of `score_from_dict`; recursive through $defs."""
    return schema.score_json_schema()


Score.__get_pydantic_core_schema__ = staticmethod(lambda source, handler: schema.field_schema(source, handler))
Score.__pydantic_serializer__ = LazySerializer(Score)
