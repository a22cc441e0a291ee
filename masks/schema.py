"""JSON Schema of masks, and MaskField for pydantic models.

The schema is what editors complete with; `mask_from_dict` is what decides, and says what is wrong.
"""

from __future__ import annotations

import copy
import functools
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, with_config
from typing_extensions import TypeAliasType, TypedDict  # typing's own need Python 3.12 here

from ..errors import MaskError
from .base import Mask
from .checks import LIMIT
from .serial import mask_from_dict

__all__ = ["MaskField", "mask_json_schema"]

_CLOSED = with_config(ConfigDict(extra="forbid"))
_Distance = Annotated[int, Field(ge=0, le=LIMIT)]
_Offset = Annotated[
    Annotated[int, Field(ge=-LIMIT, le=LIMIT)] | None,
    Field(description="Added to the row index; null: the query offset that the call gives."),
]


@_CLOSED
class FullDict(TypedDict):
    """Every key is visible."""

    kind: Literal["full"]


@_CLOSED
class CausalDict(TypedDict):
    """Keys up to the row's position are visible."""

    kind: Literal["causal"]
    offset: NotRequired[_Offset]


@_CLOSED
class SlidingWindowDict(TypedDict):
    """Keys within inclusive distances of the row's position are visible; null for no bound on that side."""

    kind: Literal["sliding_window"]
    left: NotRequired[_Distance | None]
    right: NotRequired[_Distance | None]
    offset: NotRequired[_Offset]


@_CLOSED
class ChunkedDict(TypedDict):
    """Keys in the same chunk of `size` as the row's position are visible."""

    kind: Literal["chunked"]
    size: Annotated[int, Field(ge=1, le=LIMIT)]
    offset: NotRequired[_Offset]


@_CLOSED
class PrefixDict(TypedDict):
    """Keys before `length` are visible."""

    kind: Literal["prefix"]
    length: _Distance


@_CLOSED
class MaskFunctionDict(TypedDict):
    """Keys are visible where the function registered under `name` says so."""

    kind: Literal["mask_function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
    offset: NotRequired[_Offset]


@_CLOSED
class AndDict(TypedDict):
    """Visible where every mask says so."""

    kind: Literal["and"]
    masks: list[MaskDict]


@_CLOSED
class OrDict(TypedDict):
    """Visible where some mask says so."""

    kind: Literal["or"]
    masks: list[MaskDict]


@_CLOSED
class NotDict(TypedDict):
    """Visible where the mask says no."""

    kind: Literal["not"]
    mask: MaskDict


_Leaf = FullDict | CausalDict | SlidingWindowDict | ChunkedDict | PrefixDict | MaskFunctionDict
_Object = Annotated[_Leaf | AndDict | OrDict | NotDict, Field(discriminator="kind")]
MaskDict = TypeAliasType("MaskDict", Literal["causal", "full"] | _Object)


def mask_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of what `mask_from_dict` takes; recursive through $defs."""
    return copy.deepcopy(_schema())


@functools.cache
def _schema() -> dict[str, Any]:
    return TypeAdapter(MaskDict).json_schema()


def _validate(value: Any) -> Mask:
    if not isinstance(value, Mask):
        return mask_from_dict(value)
    if not value.is_static:
        raise MaskError(f"{value} holds arrays, which a config can't; pass it in the call")
    return value


MaskField = Annotated[
    Mask,
    PlainValidator(_validate, json_schema_input_type=MaskDict),
    PlainSerializer(lambda mask: mask.to_dict(), return_type=MaskDict),
]
"""A static mask as a pydantic field: takes a Mask, its dict, "causal" or "full"; serialises to the dict."""
