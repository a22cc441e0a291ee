"""JSON Schema of masks, and masks as fields of pydantic models.

The schema is for completion in editors. `mask_from_dict` decides what is valid, and reports errors.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeAlias, Union

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema
from typing_extensions import TypeAliasType, TypedDict  # those of typing would need Python 3.12 here

from ..errors import MaskError
from ..pydantic_fields import CLOSED, kind_dict, value_schema
from .algebra import Mask
from .checks import LIMIT
from .serial import mask_from_dict
from .slots import SEGMENT_IDS

__all__ = ["field_schema", "mask_json_schema"]

_Size = Annotated[int, Field(ge=1, le=LIMIT)]
_Distance = Annotated[int, Field(ge=0, le=LIMIT)]
_Offset = NotRequired[Annotated[
    Annotated[int, Field(ge=-LIMIT, le=LIMIT)] | None,
    Field(description="Added to the row index; null: the call's query offset."),
]]  # fmt: skip
_LayoutRow = Annotated[
    str, Field(pattern=r"^[01]+$", description="A block of queries: 1 for each kv block that it sees.")
]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
_side = NotRequired[_Distance | None]

_LEAVES = (
    kind_dict("FullDict", "full", "Every key is visible."),
    kind_dict("CausalDict", "causal", "Keys up to the row's position are visible.", offset=_Offset),
    kind_dict(
        "SlidingWindowDict", "sliding_window",
        "Keys within inclusive distances of the row's position are visible; null for no bound on that side.",
        left=_side, right=_side, offset=_Offset,
    ),
    kind_dict(
        "ChunkedDict", "chunked", "Keys in the same chunk of `size` as the row's position are visible.", size=_Size,
        offset=_Offset,
    ),
    kind_dict("PrefixDict", "prefix", "Keys before `length` are visible.", length=_Distance),
    kind_dict(
        "MaskFunctionDict", "mask_function", "Keys are visible where the function registered under `name` returns true.",
        name=_Name, offset=_Offset,
    ),
    kind_dict(
        "BlocksDict", "blocks",
        "Whole blocks of keys are visible. The layout has one row per block of queries, for all heads or for each head.",
        layout=list[_LayoutRow] | list[list[_LayoutRow]], block_q=_Size, block_kv=_Size,
    ),
    kind_dict(
        "SegmentIdsDict", "segment_ids",
        "The place of a call's q_segment_ids and kv_segment_ids, visible where they are equal.",
    ),
)  # fmt: skip


@CLOSED
class AndDict(TypedDict):
    """Visible where every mask is."""

    kind: Literal["and"]
    masks: list[MaskDict]


@CLOSED
class OrDict(TypedDict):
    """Visible where any mask is."""

    kind: Literal["or"]
    masks: list[MaskDict]


@CLOSED
class NotDict(TypedDict):
    """Visible where the mask is not."""

    kind: Literal["not"]
    mask: MaskDict


if TYPE_CHECKING:
    MaskDict: TypeAlias = Any
else:
    _Object = Annotated[Union[(*_LEAVES, AndDict, OrDict, NotDict)], Field(discriminator="kind")]
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


def field_schema(mask_type: type[Mask], handler: GetCoreSchemaHandler) -> CoreSchema:
    """The schema of a pydantic field. It accepts a static mask, its dict, "causal" or "full", and is written as the dict.

    The whole dict is always written: exclude_none would turn SlidingWindow(3, None) into SlidingWindow(3), which sees no
    later keys.
    """
    read = functools.partial(_validate, mask_type)
    return value_schema(Mask, "a mask", read, lambda mask: mask.to_dict(), handler.generate_schema(MaskDict))
