"""What an Attention works with: loaded with the first one, so that importing the class loads neither the planner nor pydantic."""

from __future__ import annotations

from ...planning.score_operands import captured_names
from ...registry import OperationMetadata, OperationRegistry
from ...registry.kinds import short_axes
from ..call.arguments import check_names
from ..call.arrays import is_array
from .attention_forms import attention_html, attention_schema
from .attention_keywords import parse_attention
from .declared_options import call_options, step_options
from .declared_recurrence import declared_call

__all__ = [
    "OperationMetadata",
    "OperationRegistry",
    "attention_html",
    "attention_schema",
    "call_options",
    "captured_names",
    "check_names",
    "declared_call",
    "is_array",
    "parse_attention",
    "short_axes",
    "step_options",
]
