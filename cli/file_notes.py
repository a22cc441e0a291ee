"""Notes on a file: with "enabled": false it is planned, compiled and run all the same; its cache isn't part of a call."""

from __future__ import annotations

from typing import Any

from ..registry.declaration import Declaration

__all__ = ["enabled_notes", "file_notes", "noted"]

_DISABLED = (
    '"enabled" is false: behind an adapter the framework\'s own attention runs, and nothing shown here; this is what '
    "attnops would do if it were true"
)
_CALL_ALONE = "the file declares a cache, which `attnops plan` plans; this is the call alone"


def enabled_notes(declaration: Declaration) -> tuple[str, ...]:
    """The note for a disabled declaration; empty for an enabled one."""
    return () if declaration.enabled else (_DISABLED,)


def file_notes(declaration: Declaration) -> tuple[str, ...]:
    """The notes of commands that compile or run the call or step: also that of a cache beside a call."""
    cached = declaration.cache is not None and declaration.step is None
    return (*enabled_notes(declaration), *([_CALL_ALONE] if cached else []))


def noted(data: dict[str, Any], declaration: Declaration, notes: tuple[str, ...]) -> dict[str, Any]:
    """The JSON of a plan or a report with `enabled` and these notes added."""
    return data | {"enabled": declaration.enabled} | ({"notes": [*data.get("notes", ()), *notes]} if notes else {})
