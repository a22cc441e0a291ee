"""Kind: what a family of calls can be asked, as data, and how a case of it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..features import Feature
from ..source import Subject
from .case import CallCase

__all__ = ["DTYPES", "LARGE_LOGITS", "TRANSFORMS", "VALUES", "CallParts", "Factors", "Kind", "sized"]

Factors = Mapping[str, Mapping[str, str]]  # factor -> {level: its title}

VALUES = {"large": "large logits", "denormal": "denormal values"}
LARGE_LOGITS = {"values.large": 450.0}  # of queries that are sized as large, against keys of the usual size
_SIZES = {"large": "100", "denormal": "1e-39"}
DTYPES = {"bfloat16": "bfloat16", "float16": "float16"}
TRANSFORMS = {
    "eager": "outside jit", "vmap": "vmap", "scan": "scan", "remat": "remat", "shard_map": "shard_map", "x64": "x64 enabled",
    "debug_nans": "debug_nans",
}  # fmt: skip


class CallParts(NamedTuple):
    """A case as source. inputs: define `x`, the arrays by name, and what else the call takes. run: the body of a function of some
    of these arrays that returns the results, by the names of `results`. expected: the body of such a function of float64 arrays.
    smooth: the arrays that have a gradient. judged: lines after both that replace `got` and `want`, and may give their `sizes`.
    """

    imports: tuple[str, ...]
    inputs: tuple[str, ...]
    run: tuple[str, ...]
    expected: tuple[str, ...]
    results: tuple[str, ...]
    smooth: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A family of calls.

    plain: the title of a case without features. factors: in the order of a certificate. sizes: of a plain case; changes: those
    that a feature has instead, by its name, which shrinking keeps. brings: levels that a feature needs beside it. apart: pairs
    of factors or features that exclude each other, or have no meaning together. steps: smaller sizes that are tried, the
    boldest first. asked: factors that a convention needs an argument for. absent: why a subject can't be asked for a feature,
    beside what its convention says; None if it can. parts: a case as source. infinite: what a result that isn't finite means.
    rounds: the largest logits of a feature, by its name, where they are larger than usual.
    """

    plain: str
    factors: Factors
    sizes: Mapping[str, int]
    parts: Callable[[CallCase, Subject], CallParts]
    changes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rounds: Mapping[str, float] = field(default_factory=dict)
    brings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    apart: tuple[tuple[str, str], ...] = ()
    steps: tuple[Mapping[str, int], ...] = ()
    asked: tuple[str, ...] = ()
    absent: Callable[[Feature], str | None] = lambda one: None
    infinite: str = "has NaN or infinity"

    @property
    def features(self) -> tuple[Feature, ...]:
        """Every level of every factor."""
        return tuple(
            Feature(factor, level, title) for factor, levels in self.factors.items() for level, title in levels.items()
        )

    def of(self, levels: Mapping[str, str]) -> tuple[Feature, ...]:
        """The features of some levels, in the order of the factors."""
        return tuple(one for one in self.features if levels.get(one.factor) == one.level)

    def completed(self, levels: Mapping[str, str]) -> dict[str, str]:
        """Levels with those that they bring."""
        made = dict(levels)
        for one in self.of(levels):
            made |= {factor: level for factor, level in self.brings.get(one.name, {}).items() if factor not in levels}
        return made

    def valid(self, levels: Mapping[str, str]) -> bool:
        """Whether the levels can stand in one case."""
        features = self.of(levels)
        names = {one.name for one in features} | {one.factor for one in features}
        if any(first in names and second in names for first, second in self.apart):
            return False
        return all(
            levels.get(factor) == level for one in features for factor, level in self.brings.get(one.name, {}).items()
        )

    def case(self, levels: Mapping[str, str], seed: int) -> CallCase:
        """A case of these levels, with the sizes that they have."""
        sizes = dict(self.sizes)
        for one in self.of(levels):
            sizes |= self.changes.get(one.name, {})
        return CallCase(dict(levels), sizes, seed)

    def changed(self, levels: Mapping[str, str]) -> frozenset[str]:
        """The sizes that the levels say."""
        return frozenset(name for one in self.of(levels) for name in self.changes.get(one.name, {}))

    def largest_logit(self, levels: Mapping[str, str]) -> float:
        """The largest logit that the levels make; 0 where it is as usual."""
        return max((self.rounds.get(one.name, 0.0) for one in self.of(levels)), default=0.0)


def sized(case: CallCase, level: str, drawn: str) -> str:
    """An expression of numbers, of another size where the case's values are at this level."""
    return f"{_SIZES[level]} * {drawn}" if case.level("values") == level else drawn
