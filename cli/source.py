"""Where a command's declaration comes from: a file, or `-` for standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import AttnOpsError, ConfigError
from ..registry.declaration import Declaration

__all__ = ["declared_in"]


def declared_in(path: Path) -> Declaration:
    """Read the declaration. Errors: those of Declaration and of its metadata, with the file's name."""
    if str(path) != "-":
        declaration = Declaration.load(path)
        try:
            declaration.operation_metadata({"mesh": None})  # starts no backend
        except AttnOpsError as error:
            raise type(error)(f"{path}: {error}") from None
        return declaration
    try:
        return Declaration.from_json(sys.stdin.read().removeprefix("\ufeff"), "standard input")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: not UTF-8 at byte {error.start}; wanted JSON in UTF-8.") from None
