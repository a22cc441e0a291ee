"""Scores as fields of pydantic models. Pydantic is imported when it asks for their schema, or somebody for the JSON Schema."""

from __future__ import annotations

from typing import Any

from ..lazy import lazy_schema
from .node import Score

__all__ = ["score_json_schema"]

_schema = lazy_schema(Score, "attnops.scores.schema")


def score_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the input of `score_from_dict`; recursive through $defs."""
    described: dict[str, Any] = _schema.score_json_schema()
    return described
