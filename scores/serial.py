"""Scores from JSON values, and as pytrees. The inverse is Score.to_dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, cast

import jax

from ..errors import ScoreError, nearest, shown
from ..pytree_export import exported
from .buckets import T5, Buckets, Clip
from .functions import ScoreFunction
from .leaves import ALiBi, Distance, Forgetting, PositionTemperature, SoftCap, Temperature
from .node import Chain, Score
from .relative import RelativeBias, RelativeBias2D

__all__ = ["SCORES", "score_from_dict"]

SCORES: Mapping[str, type[Any]] = {
    cls.kind: cls
    for cls in (
        SoftCap, ALiBi, RelativeBias, RelativeBias2D, Forgetting, Temperature, PositionTemperature, Distance, ScoreFunction,
    )
}  # fmt: skip
"""The scores by kind."""
BUCKETS: Mapping[str, type[Any]] = {cls.kind: cls for cls in (T5, Clip, Buckets)}
_DEEPEST = 64
_IN_CALL = ("log_gate", "table", "height", "width", "temperature")


def score_from_dict(data: Any, at: str = "score") -> Score:
    """Build a score from the result of `Score.to_dict`, from a kind's name, or from a list of them.

    Errors: ScoreError says where, also for what is nested deeper than 64 levels.
    """
    return _read(data, at, 1)


def _read(data: Any, at: str, depth: int) -> Score:
    if depth > _DEEPEST:
        raise ScoreError(f"the score is nested deeper than {_DEEPEST} levels; put all parts into one list")
    if isinstance(data, str):
        data = {"kind": data}
    if isinstance(data, list | tuple) and depth == 1:
        data = {"kind": Chain.kind, "scores": data}
    if not isinstance(data, dict):
        hint = f". In Python, pass an object: {data.__name__}(...)" if isinstance(data, type) else ""
        raise ScoreError(
            f'{at} is {shown(data)}; wanted an object such as {{"kind": "alibi"}}, or a list of them{hint}'
        )
    kinds = (*SCORES, Chain.kind)
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ScoreError(f"{at}.kind is {shown(kind)}; wanted one of {', '.join(kinds)}.{nearest(str(kind), kinds)}")
    if kind == Chain.kind:
        parts = _fields(data, at, ("scores",))["scores"]
        if not isinstance(parts, list | tuple) or not parts:
            raise ScoreError(f"{at}.scores is {shown(parts)}; wanted a list of scores")
        scores = (_read(part, f"{at}.scores[{n}]", depth + 1) for n, part in enumerate(parts))
        return Chain(tuple(part for score in scores for part in score.parts()))
    return cast(Score, _made(SCORES[kind], data, at))


def _made(cls: type[Any], data: Mapping[str, Any], at: str) -> Any:
    names = ("name", "captures") if cls is ScoreFunction else tuple(f.name for f in dataclasses.fields(cls) if f.init)
    fields = _fields(data, at, names)
    held = [name for name in _IN_CALL if fields.get(name) is not None and name in getattr(cls, "captured", ())]
    if held and not isinstance(fields[held[0]], list | tuple):
        raise ScoreError(f"{at}.{held[0]} is {shown(fields[held[0]])}; leave it out, and pass {held[0]}= in the call")
    if isinstance(fields.get("buckets"), dict) and cls is RelativeBias:
        kind = fields["buckets"].get("kind")
        if not isinstance(kind, str) or kind not in BUCKETS:
            raise ScoreError(
                f"{at}.buckets.kind is {shown(kind)}; wanted one of {', '.join(BUCKETS)}." + nearest(str(kind), BUCKETS)
            )
        fields["buckets"] = _made(BUCKETS[kind], fields["buckets"], f"{at}.buckets")
    if cls is ScoreFunction and "captures" in fields:
        if not isinstance(fields["captures"], dict):
            raise ScoreError(f"{at}.captures is {shown(fields['captures'])}; wanted an object: name to list of dims")
        fields["captures"] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields["captures"].items()}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    try:
        return cls(**fields)
    except ScoreError as error:
        raise ScoreError(f"{at}: {error}") from None
    except TypeError:
        needed = [
            f.name
            for f in dataclasses.fields(cls)
            if f.init and f.default is dataclasses.MISSING and f.name not in fields
        ]
        raise ScoreError(f"{at} has no {shown(needed[0] if needed else 'name')}; {data['kind']} requires it") from None


def _fields(data: Mapping[str, Any], at: str, known: tuple[str, ...]) -> dict[str, Any]:
    for key in data:
        if key != "kind" and key not in known:
            raise ScoreError(
                f"{at} has an unknown key {shown(key)}; {data['kind']} has {', '.join(('kind', *known))}."
                + nearest(str(key), known)
            )
    return {key: data[key] for key in known if key in data}


def _register(cls: type[Any]) -> None:
    def flatten(score: Score) -> tuple[tuple[Any, ...], Hashable]:
        return score.arrays(), score.structure()

    def unflatten(structure: Any, arrays: Iterable[Any]) -> Score:
        rebuilt: Score = structure.with_arrays(tuple(arrays))
        return rebuilt

    jax.tree_util.register_pytree_node(cls, cast(Callable[..., Any], flatten), unflatten)
    exported(lambda structure: structure.to_dict(), lambda data: score_from_dict(data).structure())(cls)


for _cls in (*SCORES.values(), Chain):
    _register(_cls)
