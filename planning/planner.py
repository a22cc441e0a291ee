"""Planner: what planning asks about a kind of request: a call whose keys are arrays, or a step whose keys lie in pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from .capability import Reason
from .policy import Policy
from .problem import Problem

__all__ = ["Planner"]

P = TypeVar("P", bound=Problem)
L = TypeVar("L")


class Planner(ABC, Generic[P, L]):
    """Stateless: `planning.decide` makes every plan with one of these. plan: the Decision that it makes; operation: a subclass of
    PlannedOperation."""

    plan: ClassVar[type[Any]]

    @abstractmethod
    def placements(self, operation: type[Any], problem: P, policy: Policy) -> Callable[[str], L]:
        """A function from a method to where its tensors are. Errors: ShardingError, ConfigError as the policy requires."""

    @abstractmethod
    def reasons(
        self, operation: type[Any], method: str, problem: P, placement: L, policy: Policy
    ) -> tuple[Reason, ...]:
        """Every reason against a method."""

    @abstractmethod
    def notes(self, operation: type[Any], problem: P, policy: Policy, placement: L, method: str) -> tuple[str, ...]:
        """Notes on what was declared and has no effect, and on what is sent or copied; those of implementations aside."""

    @abstractmethod
    def tune_key(self, method: str, problem: P, placement: L) -> dict[str, Any]:
        """All that a measured choice depends on, as JSON values."""

    @abstractmethod
    def search(self, operation: type[Any], method: str, problem: P, placement: L) -> Any:
        """A Tuning that is searched for now, for tuning='tune'."""
