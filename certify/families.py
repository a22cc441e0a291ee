"""The cases of a subject, and what runs them in this process, by the family of its convention."""

from __future__ import annotations

from typing import Any

from .calls import CallCase, CallFamily, CallRunner, kind_of
from .case import Case
from .family import AttentionFamily, Family
from .run_case import CaseRunner
from .source import Subject

__all__ = ["case_of", "family_of", "runner_of"]


def family_of(subject: Subject) -> Family:
    """The cases of a subject."""
    attention = subject.convention.family == "attention"
    return AttentionFamily(subject) if attention else CallFamily(subject, kind_of(subject))


def runner_of(subject: Subject, given: Any = None) -> Any:
    """Runs cases of a subject in this process. given: the function, if it needn't be imported."""
    attention = subject.convention.family == "attention"
    return CaseRunner(subject, given) if attention else CallRunner(subject, kind_of(subject), given)


def case_of(subject: Subject, fields: dict[str, Any]) -> Any:
    """A case of a subject from its JSON."""
    return Case(**fields) if subject.convention.family == "attention" else CallCase(**fields)
