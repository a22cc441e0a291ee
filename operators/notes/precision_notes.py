"""What a plan notes of JAX's own settings if the products are another library's."""

from __future__ import annotations

from ...planning import AttentionProblem
from ...planning.notes import note

__all__ = ["default_precision_notes"]


def default_precision_notes(problem: AttentionProblem) -> tuple[str, ...]:
    """For float32 on an accelerator: its published tolerance requires a setting. On a CPU the setting changes nothing."""
    if problem.platform == "cpu" or problem.runtime_dtype != "float32":
        return ()
    return (note("dtype.precision"),)
