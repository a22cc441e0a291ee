"""JSON Schema of scores, and scores as fields of pydantic models.

The schema is for completion in editors. `score_from_dict` decides what is valid, and reports errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeAlias, Union

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema
from typing_extensions import TypeAliasType, TypedDict  # those of typing would need Python 3.12 here

from ..errors import ScoreError
from ..pydantic_fields import CLOSED, kind_dict, value_schema
from .node import GIVEN, Score
from .serial import score_from_dict

__all__ = ["field_schema", "score_json_schema"]

_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
_Size = Annotated[int, Field(ge=1)]
_Number = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0)]
_Numbers = Annotated[list[float] | None, Field(description="Numbers for each query head; null: passed in the call.")]
_Slopes = Annotated[list[float] | None, Field(description="A number for each query head.")]

_BUCKETS = (
    kind_dict(
        "T5Dict", "t5", "T5's buckets: exact for near keys, then logarithmic up to max_distance.",
        buckets=NotRequired[Annotated[int, Field(ge=2)]], max_distance=NotRequired[_Size], bidirectional=NotRequired[bool],
    ),
    kind_dict(
        "ClipDict", "clip", "A bucket for each distance from -left to right.", left=_Number, right=NotRequired[_Number]
    ),
    kind_dict(
        "BucketsDict", "buckets", "The function registered under `name`, with values in [0, rows).", name=_Name, rows=_Size
    ),
)  # fmt: skip
_Buckets: Any = Annotated[Union[_BUCKETS], Field(discriminator="kind")]  # noqa: UP007

_LEAVES = (
    kind_dict("SoftCapDict", "soft_cap", "cap * tanh(logit / cap).", cap=_Positive),
    kind_dict(
        "ALiBiDict", "alibi", "logit - slope * |query - key|; slopes null: those of the paper.", slopes=NotRequired[_Slopes]
    ),
    kind_dict(
        "RelativeBiasDict", "relative_bias",
        "logit + table[bucket of the distance, head]; the table is passed in the call.", buckets=NotRequired[_Buckets],
    ),
    kind_dict(
        "RelativeBias2DDict", "relative_bias_2d",
        "Tokens are the places of a grid [height, width]; the table, or height and width, are passed in the call.",
        grid=Annotated[list[_Size], Field(min_length=2, max_length=2)], decomposed=NotRequired[bool],
        class_token=NotRequired[bool],
    ),
    kind_dict(
        "ForgettingDict", "forgetting",
        "logit plus the sum of log_gate over the keys after this one; log_gate is passed in the call.",
    ),
    kind_dict("TemperatureDict", "temperature", "logit * temperature.", temperature=NotRequired[_Numbers]),
    kind_dict(
        "PositionTemperatureDict", "position_temperature",
        "logit * (1 + scale * log(1 + floor((position + 1) / floor))).", floor=NotRequired[_Positive],
        scale=NotRequired[float],
    ),
    kind_dict("DistanceDict", "distance", "logit plus a registered function of the distance.", name=_Name),
    kind_dict(
        "ScoreFunctionDict", "score_function", "A registered function of logit, batch, head, query, key and captures.",
        name=_Name, captures=NotRequired[dict[str, list[Literal["batch", "heads", "q_len", "kv_len"]]]],
    ),
)  # fmt: skip


@CLOSED
class ChainDict(TypedDict):
    """Scores applied one after the other."""

    kind: Literal["chain"]
    scores: Annotated[list[ScoreDict], Field(min_length=1)]


if TYPE_CHECKING:
    ScoreDict: TypeAlias = Any
else:
    _Object = Annotated[Union[(*_LEAVES, ChainDict)], Field(discriminator="kind")]
    _Short = Literal["alibi", "relative_bias", "forgetting", "temperature", "position_temperature"]
    ScoreDict = TypeAliasType("ScoreDict", _Short | _Object | Annotated[list[_Short | _Object], Field(min_length=1)])


def score_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the input of `score_from_dict`; recursive through $defs."""
    return TypeAdapter(ScoreDict).json_schema()


def _validate(value: Any) -> Score:
    if not isinstance(value, Score):
        return score_from_dict(value)
    if any(array is not None and not isinstance(array, tuple) and array is not GIVEN for array in value.arrays()):
        raise ScoreError(f"{value} holds arrays, which a config can't; leave them out there, and pass them in the call")
    return value


def field_schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """The schema of a pydantic field. It accepts a score without arrays, its dict, a kind's name or a list, and is written as the
    dict."""
    return value_schema(Score, "a score", _validate, lambda score: score.to_dict(), handler.generate_schema(ScoreDict))
