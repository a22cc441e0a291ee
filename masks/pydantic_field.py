"""Masks as fields of pydantic models. Pydantic is imported when it asks for their schema, or somebody for the JSON Schema."""

from __future__ import annotations

from typing import Any

from ..lazy import lazy_schema
from .algebra import Mask

__all__ = ["mask_json_schema"]

_schema = lazy_schema(Mask, "attnops.masks.schema")


def mask_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the input of `mask_from_dict`; recursive through $defs."""
    described: dict[str, Any] = _schema.mask_json_schema()
    return described
