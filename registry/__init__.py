"""What is declared, and which operations exist: metadata, declarations, the registry."""

from .metadata import OperationMetadata
from .registry import OperationRegistry
from .unset import UNSET

__all__ = [
    "UNSET",
    "OperationMetadata",
    "OperationRegistry",
]
