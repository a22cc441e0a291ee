"""Values of attnops as fields of pydantic models: how they are read, described and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict, with_config
from pydantic_core import CoreSchema, PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import TypedDict  # that of typing would need Python 3.12 for pydantic

__all__ = ["CLOSED", "kind_dict", "value_schema"]

CLOSED = with_config(ConfigDict(extra="forbid"))
"""Class decorator: a TypedDict without other keys."""
_typed_dict: Any = TypedDict


def kind_dict(name: str, kind: str, doc: str, /, **fields: Any) -> Any:
    """The dict of an object of this kind: a TypedDict without other keys, whose docstring becomes the schema's description."""
    made = _typed_dict(name, {"kind": Literal[kind], **fields})
    made.__doc__ = doc
    return CLOSED(made)


def value_schema(
    owner: type, what: str, read: Callable[[Any], Any], write: Callable[[Any], Any], described: CoreSchema | None = None,
    written: CoreSchema | None = None,
) -> CoreSchema:  # fmt: skip
    """The schema of a field that holds an `owner`, named `what` in errors. read: from what is given; write: to what is written,
    always whole. described: what is given, as a schema; written: the schema of what is written, if it is serialised by one."""

    def serialise(value: Any) -> Any:
        if not isinstance(value, owner):  # pydantic tries the branches of a union in turn
            raise PydanticSerializationUnexpectedValue(f"a {type(value).__name__} is not {what}")
        return write(value)

    if described is not None and written is None:
        # Described, but not serialised by a schema, so that nothing is left out.
        whole: Any = {
            **described, "serialization": core_schema.plain_serializer_function_ser_schema(lambda data: data)
        }  # fmt: skip
        written = whole
    return core_schema.no_info_plain_validator_function(
        read,
        json_schema_input_schema=described,
        serialization=core_schema.plain_serializer_function_ser_schema(serialise, return_schema=written),
    )
