"""How the command treats a file with "enabled": false: it plans, compiles and runs it, and adds a note."""

from __future__ import annotations

from typing import Any

from ..registry.declaration import Declaration

__all__ = ["enabled_json", "enabled_notes"]

_DISABLED = (
    '"enabled" is false: behind an adapter the framework\'s own attention runs, and nothing shown here; this is what '
    "attnops would do if it were true"
)


def enabled_notes(declaration: Declaration) -> tuple[str, ...]:
    """The note for a disabled declaration; empty for an enabled one."""
    return () if declaration.enabled else (_DISABLED,)


def enabled_json(data: dict[str, Any], notes: tuple[str, ...]) -> dict[str, Any]:
    """The JSON of a plan or a report with `enabled` and the note added."""
    return data | {"enabled": not notes} | ({"notes": [*data.get("notes", ()), *notes]} if notes else {})
