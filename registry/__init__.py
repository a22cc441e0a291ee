"""What is declared and what exists: metadata, declarations, operations."""

from .metadata import OperationMetadata
from .registry import OperationRegistry
from .unset import UNSET

__all__ = [
    "UNSET",
    "OperationMetadata",
    "OperationRegistry",
]
