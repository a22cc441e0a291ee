"""CallFamily: the cases of a subject whose kind is declared: each feature alone, pairs of them, and smaller ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..covering import covering
from ..family import Family
from ..features import Feature
from ..source import Subject
from .case import DEFAULTS, CallCase
from .kind import Kind
from .lines import script

__all__ = ["CallFamily"]

_DRAWN = 600  # rows of levels that pairs are chosen from


class CallFamily(Family):
    """The cases of one subject."""

    def __init__(self, subject: Subject, kind: Kind) -> None:
        self.subject, self.kind = subject, kind
        self.plain = Feature("plain", "yes", kind.plain)
        self.features = kind.features

    def inexpressible(self, one: Feature) -> str | None:
        convention = self.subject.convention
        why = convention.cannot.get(one.name) or convention.cannot.get(one.factor) or self.kind.absent(one)
        if why is not None:
            return why
        if one.factor == "gradient" and not convention.gradient:
            return "not differentiable"
        said = {one.name, one.factor} & set(convention.arguments)
        return "no argument for it" if one.factor in self.kind.asked and not said else None

    def features_of(self, case: CallCase) -> tuple[Feature, ...]:
        return self.kind.of(case.levels)

    def alone(self, features: Collection[Feature], seed: int, quick: bool) -> Iterator[tuple[Feature | None, Any]]:
        kind = self.kind
        smooth = [one for one in self.features if one.factor == "gradient" and self.inexpressible(one) is None]
        yield None, kind.case({}, seed)
        for number, one in enumerate(self.features):
            if one not in features:
                continue
            levels = kind.completed({one.factor: one.level})
            with_gradient = levels | {"gradient": "yes"}
            both = bool(smooth) and "gradient" not in levels and kind.valid(with_gradient)
            if not (quick and both and number % 2):
                yield one, kind.case(levels, seed + number)
            if both and not (quick and number % 2 == 0):
                yield one, kind.case(with_gradient, seed + number)

    def paired(self, features: Collection[Feature], seed: int, most: int) -> list[Any]:
        rng = np.random.default_rng([seed, 31])
        choices: dict[str, list[str]] = {}
        for one in self.features:
            if one in features:
                choices.setdefault(one.factor, [DEFAULTS.get(one.factor, "no")]).append(one.level)
        rows: dict[tuple[str, ...], None] = {}
        rare = 2.5 / max(len(choices), 1)  # a case has a few features
        for _ in range(_DRAWN if len(choices) > 1 else 0):
            drawn = {
                factor: str(levels[int(rng.integers(1, len(levels)))])
                for factor, levels in choices.items()
                if rng.random() < max(rare, 0.25)
            }
            levels = self.kind.completed(drawn)
            if len(levels) > 1 and set(self.kind.of(levels)) <= set(features) and self.kind.valid(levels):
                rows[tuple(levels.get(factor, some[0]) for factor, some in choices.items())] = None
        if len(rows) < 2:
            return []
        chosen = covering(list(rows), 2)
        if most < len(chosen):  # those with most features meet most pairs
            default = [some[0] for some in choices.values()]
            chosen.sort(key=lambda row: -sum(a != b for a, b in zip(row, default, strict=True)))
        cases = [
            {f: level for f, level in zip(choices, row, strict=True) if level != choices[f][0]} for row in chosen[:most]
        ]
        return [self.kind.case(levels, seed + 100 + n) for n, levels in enumerate(cases)]

    def smaller(self, case: CallCase) -> Iterator[CallCase]:
        kind = self.kind
        for factor in case.levels:
            levels = {name: level for name, level in case.levels.items() if name != factor}
            if kind.valid(levels):
                fresh = kind.case(levels, case.seed)
                kept = kind.changed(case.levels) | kind.changed(levels)
                yield replace(
                    fresh, sizes={n: x if n in kept else min(x, case.sizes[n]) for n, x in fresh.sizes.items()}
                )
        kept = kind.changed(case.levels)
        for step in kind.steps:
            if not kept & set(step) and all(case.sizes[name] > size for name, size in step.items()):
                yield replace(case, sizes={**case.sizes, **step})
        if case.seed:
            yield replace(case, seed=0)

    def essential(self, case: CallCase) -> frozenset[Feature]:
        brought: set[tuple[str, str]] = set()
        for one in self.features_of(case):
            brought |= set(self.kind.brings.get(one.name, {}).items())
        return frozenset(one for one in self.features_of(case) if (one.factor, one.level) not in brought)

    def script(self, case: CallCase, title: str) -> str:
        return script(self.kind.parts(case, self.subject), case, self.subject, title)
