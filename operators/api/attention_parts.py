"""What an Attention works with: loaded with the first one, so that importing the class loads neither the planner nor pydantic."""

from __future__ import annotations

from ...registry import OperationMetadata, OperationRegistry
from ...registry.kinds import short_axes
from .attention_calls import calls_of
from .attention_forms import attention_html, attention_schema
from .attention_keywords import parse_attention

__all__ = [
    "OperationMetadata",
    "OperationRegistry",
    "attention_html",
    "attention_schema",
    "calls_of",
    "parse_attention",
    "short_axes",
]
