"""Notes on declared fields for split sequences that have no effect on a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..notes import note
from ..operation import PlannedOperation
from ..placement import Placement
from .split import loop_from

if TYPE_CHECKING:
    from ..policy import Policy

__all__ = ["sequence_notes"]


def sequence_notes(operation: type[PlannedOperation], policy: Policy, placement: Placement) -> tuple[str, ...]:
    """A note for each field without effect."""
    split, notes = placement.sequence, []
    if not split.strategy and operation.sequence_parallel is not None:
        notes.append(note("sequence.nothing_to_do", operation=operation.name))
    if not split.strategy and policy.sequence_parallel != "auto":
        notes.append(note("sequence.unsplit", strategy=policy.sequence_parallel))
    if not split.ring_axes:
        declared = {"ring_order": policy.ring_order, "scan_ring_attention": policy.scan_ring_attention}
        notes += [
            note("sequence.no_ring", name=name, value=value) for name, value in declared.items() if value is not None
        ]
    elif policy.scan_ring_attention and loop_from(split.steps) is None:
        notes.append(note("sequence.no_scan", steps=split.steps))
    return tuple(notes)
