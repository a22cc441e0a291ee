"""Notes on declared fields for split sequences that have no effect on a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..operation import PlannedOperation
from ..placement import Placement
from ..problem import AttentionProblem
from .split import loop_from

if TYPE_CHECKING:
    from ..policy import Policy

__all__ = ["sequence_notes"]


def sequence_notes(
    operation: type[PlannedOperation], problem: AttentionProblem, policy: Policy, placement: Placement
) -> tuple[str, ...]:
    """A note for each field without effect."""
    split, notes = placement.sequence, []
    if not split.strategy and operation.sequence_parallel is not None:
        notes.append(f"nothing splits the sequence of this call, so {operation.name} has nothing to do")
    if not split.strategy and policy.sequence_parallel != "auto":
        notes.append(
            f"sequence_parallel={policy.sequence_parallel!r} has no effect: nothing splits the sequence of this call"
        )
    if not split.ring_axes:
        declared = {"ring_order": policy.ring_order, "scan_ring_attention": policy.scan_ring_attention}
        notes += [
            f"{name}={value!r} has no effect: this call runs no ring"
            for name, value in declared.items()
            if value is not None
        ]
    elif policy.scan_ring_attention and loop_from(split.steps) is None:
        notes.append(
            f"scan_ring_attention=True has no effect: a ring's steps {split.steps} are too few or too irregular for a loop and "
            "are compiled one by one"
        )
    return tuple(notes)
