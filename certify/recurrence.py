"""RecurrenceFamily: the cases of attnops' recurrent operations. Each optional array is a feature; the table has the shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .covering import covering
from .family import Family
from .features import Feature
from .recurrence_source import recurrence_lines
from .source import Subject

__all__ = ["RecurrenceCase", "RecurrenceFamily"]

_DRAWN = 600  # rows of levels that pairs are chosen from
_ARRAYS = {
    "decay": "decay",
    "beta": "beta",
    "D": "D",
    "dt_bias": "bias of dt",
    "bias": "bias",
    "initial_state": "initial state",
    "segment_ids": "segment ids",
    "lengths": "lengths by row",
}
_OTHERS = {
    "tokens": {"odd": "odd length", "one": "one token", "chunks": "more than one chunk of tokens"},
    "heads": {"gqa": "grouped heads"},
    "dims": {"value": "value dim of its own"},
    "dtype": {"bfloat16": "bfloat16", "float16": "float16"},
    "layout": {"bhtd": "layout [batch, heads, length, dim]", "thd": "packed layout [length, heads, dim]"},
    "gradient": {"yes": "gradient"},
    "transform": {
        "eager": "outside jit",
        "vmap": "vmap",
        "scan": "scan",
        "remat": "remat",
        "x64": "x64 enabled",
        "debug_nans": "debug_nans",
    },
}
_DEFAULTS = {"dtype": "float32", "layout": "bthd", "transform": "jit", "tokens": "even"}


@dataclass(frozen=True)
class RecurrenceCase:
    """One call: levels of every factor, and sizes. Numbers are drawn by `seed`."""

    levels: dict[str, str] = field(default_factory=dict)
    batch: int = 2
    tokens: int = 8
    kv_heads: int = 2
    heads: int = 2
    dim: int = 8
    value_dim: int = 8
    seed: int = 0

    def __hash__(self) -> int:
        return hash(repr(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def level(self, factor: str) -> str:
        """Its level of a factor."""
        return self.levels.get(factor, _DEFAULTS.get(factor, "no"))

    @property
    def features(self) -> tuple[Feature, ...]:
        """What it has beside the arrays that are required."""
        return tuple(one for one in _FEATURES if self.levels.get(one.factor) == one.level)


_FEATURES = tuple(
    [Feature(name, "yes", title) for name, title in _ARRAYS.items()]
    + [Feature(factor, level, title) for factor, levels in _OTHERS.items() for level, title in levels.items()]
)


def _made(levels: dict[str, str], seed: int) -> RecurrenceCase:
    tokens = {"odd": 7, "one": 1, "chunks": 70}.get(levels.get("tokens", ""), 8)
    heads, kv_heads = (4, 2) if levels.get("heads") == "gqa" else (2, 2)
    return RecurrenceCase(
        levels, 1 if levels.get("layout") == "thd" else 2, tokens, kv_heads, heads, 8,
        6 if levels.get("dims") == "value" else 8, seed,
    )  # fmt: skip


class RecurrenceFamily(Family):
    """The cases of one recurrent operation. operation: its class."""

    plain = Feature("plain", "yes", "the required arrays alone")
    features = _FEATURES

    def __init__(self, subject: Subject, operation: Any) -> None:
        self.subject, self.operation = subject, operation
        self.table = operation.operands

    def inexpressible(self, one: Feature) -> str | None:
        rows = {row.name: row for row in self.table}
        if one.factor in _ARRAYS:
            if one.factor not in rows or not rows[one.factor].optional:
                return "no optional array of this name"
            return "needs raw gates, which the config declares" if one.factor == "dt_bias" and "A_log" in rows else None
        dims = {dim for row in self.table for dim in row.dims}
        needs = {"heads": "kv_heads", "dims": "value_dim"}.get(one.factor)
        return "channels have no heads" if needs is not None and needs not in dims else None

    def _levels(self, changes: dict[str, str]) -> dict[str, str]:
        levels = dict(changes)
        if levels.get("layout") == "thd":
            levels.pop("lengths", None)
        if levels.get("transform") == "remat":
            levels["gradient"] = "yes"
        return levels

    def alone(self, features: Collection[Feature], seed: int, quick: bool) -> Iterator[tuple[Feature | None, Any]]:
        yield None, _made({}, seed)
        for number, one in enumerate(_FEATURES):
            if one in features:
                levels = self._levels({one.factor: one.level})
                both = levels.get("gradient") != "yes"
                if not (quick and both and number % 2):
                    yield one, _made(levels, seed + number)
                if both and not (quick and number % 2 == 0):
                    yield one, _made(levels | {"gradient": "yes"}, seed + number)

    def paired(self, features: Collection[Feature], seed: int, most: int) -> list[Any]:
        rng = np.random.default_rng([seed, 31])
        choices: dict[str, list[str]] = {}
        for one in _FEATURES:
            if one in features:
                choices.setdefault(one.factor, [_DEFAULTS.get(one.factor, "no")]).append(one.level)
        kept = {(one.factor, one.level) for one in features}
        rows: dict[tuple[str, ...], None] = {}
        for _ in range(_DRAWN if len(choices) > 1 else 0):
            drawn = {factor: str(rng.choice(levels)) for factor, levels in choices.items()}
            levels = self._levels({f: level for f, level in drawn.items() if level != choices[f][0]})
            if levels and all(item in kept for item in levels.items()):
                rows[tuple(levels.get(factor, some[0]) for factor, some in choices.items())] = None
        if len(rows) < 2:
            return []
        chosen = covering(list(rows), 2)[:most]
        cases = [{f: level for f, level in zip(choices, row, strict=True) if level != choices[f][0]} for row in chosen]
        return [_made(levels, seed + 100 + n) for n, levels in enumerate(cases)]

    def smaller(self, case: RecurrenceCase) -> Iterator[RecurrenceCase]:
        for factor in case.levels:
            levels = {name: level for name, level in case.levels.items() if name != factor}
            fresh = _made(levels, case.seed)
            yield replace(fresh, **{name: min(getattr(fresh, name), getattr(case, name)) for name in ("batch", "dim")})
        if case.batch > 1:
            yield replace(case, batch=1)
        for tokens in (1, 2, 3, 5):
            if tokens < case.tokens and case.levels.get("tokens") != "chunks":
                yield replace(case, tokens=tokens)
        if case.kv_heads > 1:
            yield replace(case, heads=case.heads // case.kv_heads, kv_heads=1)
        for dim in (1, 2, 4):
            if dim < case.dim and case.dim == case.value_dim:
                yield replace(case, dim=dim, value_dim=dim)

    def essential(self, case: RecurrenceCase) -> frozenset[Feature]:
        beside = {"gradient"} if case.levels.get("transform") == "remat" else set()
        return frozenset(one for one in case.features if one.factor not in beside)

    def script(self, case: RecurrenceCase, title: str) -> str:
        lines = recurrence_lines(case, self.subject, self.operation)
        body = [lines.imports[0], *lines.options, *lines.imports[1:], *lines.inputs, *lines.call, *lines.expected]
        return "\n".join((*(f"# {line}" for line in title.splitlines()), *body)) + "\n"
