"""A pool's record of one sequence's slots."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["SlotState", "SlotStep"]


class SlotStep(NamedTuple):
    """What a sequence's last tokens read and write: how many they are, the slot of the state before them (None: zeros), and the
    slots of the states after all of them, without the last, and so on."""

    tokens: int
    read: int | None
    written: tuple[int, ...]


@dataclass(slots=True)
class SlotState:
    """The slots of a sequence, and what is known of its tokens.

    kept: for each length of which the state is kept, its slot; the last is that of all tokens. A sequence without tokens has the
    state zeros, and no slot. spare: slots for later tokens. tokens: the ids of the first tokens, as far as they are known; keys:
    the prefix keys of the first whole pages, as far as they were needed. step: None before tokens are appended, and once they
    are cut.
    """

    length: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    spare: list[int] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("q"))
    keys: list[bytes] = field(default_factory=list)
    step: SlotStep | None = None

    @property
    def slots(self) -> list[int]:
        """All slots that the sequence has."""
        return [*self.kept.values(), *self.spare]
