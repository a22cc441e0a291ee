"""Outcome: what a check of a program came to. Only `passed` says that everything was checked."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Outcome", "outcome_of"]


class Outcome(StrEnum):
    """passed: compiled, fits, and every check agrees. compiled: the same as far as could be checked. lowered: only lowered, as
    asked for. not compiled: asked for and not done. failed: refused, doesn't compile, doesn't fit, or sends something else."""

    PASSED = "passed"
    COMPILED = "compiled"
    LOWERED = "lowered"
    NOT_COMPILED = "not compiled"
    FAILED = "failed"

    @property
    def accepted(self) -> bool:
        """Whether the command's exit status is 0."""
        return self in (Outcome.PASSED, Outcome.COMPILED, Outcome.LOWERED)


def outcome_of(*, failed: bool, compiled: bool, lower_only: bool, unchecked: tuple[str, ...]) -> Outcome:
    """The outcome of a program. compiled: all of it. lower_only: nothing else was asked for. unchecked: what couldn't be."""
    if failed:
        return Outcome.FAILED
    if not compiled:
        return Outcome.LOWERED if lower_only else Outcome.NOT_COMPILED
    return Outcome.COMPILED if unchecked else Outcome.PASSED
