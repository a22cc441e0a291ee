"""JSON Schema of scores, and scores as fields of pydantic models.

The schema is for completion in editors. `score_from_dict` decides what is valid, and reports errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, with_config
from pydantic_core import PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import TypeAliasType, TypedDict  # those of typing would need Python 3.12 here

from ..errors import ScoreError
from .node import GIVEN, Score
from .serial import score_from_dict

__all__ = ["field_schema", "score_json_schema"]

_CLOSED = with_config(ConfigDict(extra="forbid"))
_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
_Size = Annotated[int, Field(ge=1)]
_Numbers = Annotated[list[float] | None, Field(description="Numbers for each query head; null: passed in the call.")]


@_CLOSED
class SoftCapDict(TypedDict):
    """cap * tanh(logit / cap)."""

    kind: Literal["soft_cap"]
    cap: Annotated[float, Field(gt=0)]


@_CLOSED
class ALiBiDict(TypedDict):
    """logit - slope * |query - key|; slopes null: those of the paper."""

    kind: Literal["alibi"]
    slopes: NotRequired[Annotated[list[float] | None, Field(description="A number for each query head.")]]


@_CLOSED
class T5Dict(TypedDict):
    """T5's buckets: exact for near keys, then logarithmic up to max_distance."""

    kind: Literal["t5"]
    buckets: NotRequired[Annotated[int, Field(ge=2)]]
    max_distance: NotRequired[_Size]
    bidirectional: NotRequired[bool]


@_CLOSED
class ClipDict(TypedDict):
    """A bucket for each distance from -left to right."""

    kind: Literal["clip"]
    left: Annotated[int, Field(ge=0)]
    right: NotRequired[Annotated[int, Field(ge=0)]]


@_CLOSED
class BucketsDict(TypedDict):
    """The function registered under `name`, with values in [0, rows)."""

    kind: Literal["buckets"]
    name: _Name
    rows: _Size


@_CLOSED
class RelativeBiasDict(TypedDict):
    """logit + table[bucket of the distance, head]; the table is passed in the call."""

    kind: Literal["relative_bias"]
    buckets: NotRequired[Annotated[T5Dict | ClipDict | BucketsDict, Field(discriminator="kind")]]


@_CLOSED
class RelativeBias2DDict(TypedDict):
    """Tokens are the places of a grid [height, width]; the table, or height and width, are passed in the call."""

    kind: Literal["relative_bias_2d"]
    grid: Annotated[list[_Size], Field(min_length=2, max_length=2)]
    decomposed: NotRequired[bool]
    class_token: NotRequired[bool]


@_CLOSED
class ForgettingDict(TypedDict):
    """logit plus the sum of log_gate over the keys after this one; log_gate is passed in the call."""

    kind: Literal["forgetting"]


@_CLOSED
class TemperatureDict(TypedDict):
    """logit * temperature."""

    kind: Literal["temperature"]
    temperature: NotRequired[_Numbers]


@_CLOSED
class PositionTemperatureDict(TypedDict):
    """logit * (1 + scale * log(1 + floor((position + 1) / floor)))."""

    kind: Literal["position_temperature"]
    floor: NotRequired[Annotated[float, Field(gt=0)]]
    scale: NotRequired[float]


@_CLOSED
class DistanceDict(TypedDict):
    """logit plus a registered function of the distance."""

    kind: Literal["distance"]
    name: _Name


@_CLOSED
class ScoreFunctionDict(TypedDict):
    """A registered function of logit, batch, head, query, key and captures."""

    kind: Literal["score_function"]
    name: _Name
    captures: NotRequired[dict[str, list[Literal["batch", "heads", "q_len", "kv_len"]]]]


@_CLOSED
class ChainDict(TypedDict):
    """Scores applied one after the other."""

    kind: Literal["chain"]
    scores: Annotated[list[ScoreDict], Field(min_length=1)]


_Leaf = (
    SoftCapDict | ALiBiDict | RelativeBiasDict | RelativeBias2DDict | ForgettingDict | TemperatureDict
    | PositionTemperatureDict | DistanceDict | ScoreFunctionDict
)  # fmt: skip
_Object = Annotated[_Leaf | ChainDict, Field(discriminator="kind")]
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


def _write(value: Any) -> dict[str, Any]:
    if not isinstance(value, Score):  # pydantic tries the branches of a union in turn
        raise PydanticSerializationUnexpectedValue(f"a {type(value).__name__} is not a score")
    return value.to_dict()


def field_schema(source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    """The schema of a pydantic field. It accepts a score without arrays, its dict, a kind's name or a list, and is written as the
    dict."""
    del source
    as_dict = handler.generate_schema(ScoreDict)
    whole: Any = {**as_dict, "serialization": core_schema.plain_serializer_function_ser_schema(lambda data: data)}
    return core_schema.no_info_plain_validator_function(
        _validate,
        json_schema_input_schema=as_dict,
        serialization=core_schema.plain_serializer_function_ser_schema(_write, return_schema=whole),
    )
