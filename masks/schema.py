"""JSON Schema of masks, and masks as fields of pydantic models.

The schema is for completion in editors. `mask_from_dict` decides what is valid, and reports errors.
"""

from __future__ import annotations

import copy
import functools
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, with_config
from pydantic_core import PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import TypeAliasType, TypedDict  # those of typing would need Python 3.12 here

from ..errors import MaskError
from .algebra import Mask
from .checks import LIMIT
from .serial import mask_from_dict
from .slots import SEGMENT_IDS

__all__ = ["field_schema", "mask_json_schema"]

_CLOSED = with_config(ConfigDict(extra="forbid"))
_Distance = Annotated[int, Field(ge=0, le=LIMIT)]
_Offset = Annotated[
    Annotated[int, Field(ge=-LIMIT, le=LIMIT)] | None,
    Field(description="Added to the row index; null: the call's query offset."),
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
    """Keys are visible where the function registered under `name` returns true."""

    kind: Literal["mask_function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
    offset: NotRequired[_Offset]


_LayoutRow = Annotated[
    str, Field(pattern=r"^[01]+$", description="A block of queries: 1 for each kv block that it sees.")
]


@_CLOSED
class BlocksDict(TypedDict):
    """Whole blocks of keys are visible. The layout has one row per block of queries, for all heads or for each head."""

    kind: Literal["blocks"]
    layout: list[_LayoutRow] | list[list[_LayoutRow]]
    block_q: Annotated[int, Field(ge=1, le=LIMIT)]
    block_kv: Annotated[int, Field(ge=1, le=LIMIT)]


@_CLOSED
class SegmentIdsDict(TypedDict):
    """The place of a call's q_segment_ids and kv_segment_ids, visible where they are equal."""

    kind: Literal["segment_ids"]


@_CLOSED
class AndDict(TypedDict):
    """Visible where every mask is."""

    kind: Literal["and"]
    masks: list[MaskDict]


@_CLOSED
class OrDict(TypedDict):
    """Visible where any mask is."""

    kind: Literal["or"]
    masks: list[MaskDict]


@_CLOSED
class NotDict(TypedDict):
    """Visible where the mask is not."""

    kind: Literal["not"]
    mask: MaskDict


_Leaf = (
    FullDict
    | CausalDict
    | SlidingWindowDict
    | ChunkedDict
    | PrefixDict
    | MaskFunctionDict
    | BlocksDict
    | SegmentIdsDict
)
_Object = Annotated[_Leaf | AndDict | OrDict | NotDict, Field(discriminator="kind")]
MaskDict = TypeAliasType("MaskDict", Literal["causal", "full"] | _Object)


def mask_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the input of `mask_from_dict`; recursive through $defs."""
    return copy.deepcopy(_schema())


@functools.cache
def _schema() -> dict[str, Any]:
    return TypeAdapter(MaskDict).json_schema()


def _validate(mask_type: type[Mask], value: Any) -> Mask:
    mask = value if isinstance(value, Mask) else mask_from_dict(value)
    if not all(leaf.is_static or leaf == SEGMENT_IDS for leaf in mask.leaves()):
        raise MaskError(f"{mask} holds arrays, which a config can't; pass it in the call")
    if not isinstance(mask, mask_type):
        raise MaskError(f"{mask} is a {type(mask).__name__}; wanted a {mask_type.__name__}, the type of the field")
    return mask


def _write(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mask):  # pydantic tries the branches of a union in turn
        raise PydanticSerializationUnexpectedValue(f"a {type(value).__name__} is not a mask")
    return value.to_dict()


def field_schema(mask_type: type[Mask], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    """The schema of a pydantic field. It accepts a static mask, its dict, "causal" or "full", and is written as the dict.

    The whole dict is always written: exclude_none would turn SlidingWindow(3, None) into SlidingWindow(3), which sees no
    later keys.
    """
    as_dict = handler.generate_schema(MaskDict)
    # Described as a MaskDict, but not serialised by a schema, so that nothing is left out.
    whole: Any = {**as_dict, "serialization": core_schema.plain_serializer_function_ser_schema(lambda data: data)}
    return core_schema.no_info_plain_validator_function(
        functools.partial(_validate, mask_type),
        json_schema_input_schema=as_dict,
        serialization=core_schema.plain_serializer_function_ser_schema(_write, return_schema=whole),
    )
