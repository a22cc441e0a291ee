"""Planner: what planning asks about a kind of request: a call whose keys are arrays, or a step whose keys lie in pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from .capability import Reason
from .policy import Policy
from .problem import Problem

__all__ = ["Planner", "Request"]

P = TypeVar("P", bound=Problem)
L = TypeVar("L")


class Request(NamedTuple, Generic[P]):
    """What is planned: a subclass of PlannedOperation, what is asked of it, and what to do when things don't fit."""

    operation: Any
    problem: P
    policy: Policy


class Planner(ABC, Generic[P, L]):
    """Stateless: `planning.decide` makes every plan with one of these. plan: the Decision that it makes. unsearched: why
    tuning='tune' doesn't search while it plans; '' if it does."""

    plan: ClassVar[type[Any]]
    unsearched: ClassVar[str] = ""

    @abstractmethod
    def placements(self, request: Request[P]) -> Callable[[str], L]:
        """A function from a method to where its tensors are. Errors: ShardingError, ConfigError as the policy requires."""

    @abstractmethod
    def reasons(self, request: Request[P], method: str, placement: L) -> tuple[Reason, ...]:
        """Every reason against a method."""

    @abstractmethod
    def notes(self, request: Request[P], method: str, placement: L) -> tuple[str, ...]:
        """Notes on what was declared and has no effect, and on what is sent or copied; those of implementations aside."""

    @abstractmethod
    def tune_key(self, method: str, problem: P, placement: L) -> dict[str, Any]:
        """All that a measured choice depends on, as JSON values."""
