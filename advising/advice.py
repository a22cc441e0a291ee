"""Advice: the result of a search, the best candidates first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import RefusedError
from .entries import Entry, Refusal
from .report import ESTIMATES, entries_json, rows

__all__ = ["Advice"]


@dataclass(frozen=True)
class Advice:
    """The candidates in the order of their estimates, and why the others can't run."""

    target: str
    entries: tuple[Entry, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    planned: int

    @property
    def best(self) -> Entry:
        """The first candidate. Errors: RefusedError if there is none, with every reason."""
        if not self.entries:
            raise RefusedError(self.refusal())
        return self.entries[0]

    def refusal(self) -> str:
        """Why nothing can run the call there."""
        reasons = "; ".join(map(str, self.refused))
        return f"nothing can run this call on {self.target}: {reasons or 'no mesh has the fixed sizes'}."

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "target": self.target,
            "planned": self.planned,
            "entries": entries_json(self.entries),
            "refused": [vars(refusal) for refusal in self.refused],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{self.target}: {len(self.entries)} of {self.planned} planned candidates can run. {ESTIMATES}"]
        lines += ["  ".join(cell for cell in row if cell) for row in rows(self.entries)]
        lines += [f"refused  {refusal}" for refusal in self.refused]
        return "\n".join(lines + [f"note     {note}" for note in self.notes])
