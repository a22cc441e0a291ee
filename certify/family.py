"""Family: which cases there are of a kind of function, how they are made small, and how they are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any

from .case import Case
from .cases import alone, inexpressible, paired
from .features import DEAD, FEATURES, Feature, implied
from .shrink import shrunk, smaller
from .source import Subject, script

__all__ = ["AttentionFamily", "Family"]


class Family(ABC):
    """The cases of one subject, which are hashable. plain: the row of a case without features."""

    plain: Feature
    features: tuple[Feature, ...]

    @abstractmethod
    def inexpressible(self, one: Feature) -> str | None:
        """Why the subject can't be asked for a feature; None if it can."""

    @abstractmethod
    def features_of(self, case: Any) -> tuple[Feature, ...]:
        """What a case has beside plain."""

    @abstractmethod
    def alone(self, features: Collection[Feature], seed: int, quick: bool) -> Iterator[tuple[Feature | None, Any]]:
        """A plain case (None), and cases of each feature beside as little as it needs."""

    @abstractmethod
    def paired(self, features: Collection[Feature], seed: int, most: int) -> list[Any]:
        """At most so many cases in which features meet."""

    @abstractmethod
    def smaller(self, case: Any) -> Iterator[Any]:
        """Simpler cases, the boldest first."""

    @abstractmethod
    def essential(self, case: Any) -> frozenset[Feature]:
        """The features that a case is about: without those that others bring."""

    @abstractmethod
    def script(self, case: Any, title: str) -> str:
        """A program that shows what a case gives and what is expected."""

    def note(self, one: Feature) -> str:
        """What has to be known of a feature that is right."""
        return ""

    def shrunk(self, case: Any, fails: Callable[[Any], bool], most: int) -> Any:
        """The smallest case that still fails, of at most so many that are tried."""
        return shrunk(case, fails, self.smaller, most)


class AttentionFamily(Family):
    """Softmax attention of query, key and value, called by a convention."""

    plain = Feature("plain", "yes", "softmax(q k / sqrt(dim)) v")
    features = FEATURES

    def __init__(self, subject: Subject) -> None:
        self.subject, self.convention = subject, subject.convention
        keep = {"transform"} if self.convention.framework == "torch" else set()
        self.keep = frozenset(keep | ({"layout"} if "bthd" not in self.convention.layouts else set()))

    def inexpressible(self, one: Feature) -> str | None:
        return inexpressible(one, self.convention)

    def features_of(self, case: Case) -> tuple[Feature, ...]:
        return case.features

    def alone(self, features: Collection[Feature], seed: int, quick: bool) -> Iterator[tuple[Feature | None, Any]]:
        return alone(self.convention, features, seed, quick=quick)

    def paired(self, features: Collection[Feature], seed: int, most: int) -> list[Any]:
        return list(paired(self.convention, features, seed, most))

    def smaller(self, case: Case) -> Iterator[Case]:
        return smaller(case, self.keep)

    def essential(self, case: Case) -> frozenset[Feature]:
        beside = self.keep | implied(case.levels)
        return frozenset(one for one in case.features if one.factor not in beside)

    def script(self, case: Case, title: str) -> str:
        return script(case, self.subject, title)

    def note(self, one: Feature) -> str:
        if one.name in DEAD and self.convention.dead_rows == "unspecified":
            return "not documented what such a row is: anything but NaN counts"
        return ""
