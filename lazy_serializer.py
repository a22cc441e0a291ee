"""LazySerializer: what pydantic writes a value with if it goes by the value instead of a field's type, made when it is needed."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

__all__ = ["LazySerializer"]


class LazySerializer:
    """A class attribute `__pydantic_serializer__`. Without it, pydantic would write a plain dataclass (Any, serialize_as_any)."""

    def __init__(self, owner: type) -> None:
        self.owner = owner

    def __get__(self, instance: Any, cls: type) -> Any:
        serializer = TypeAdapter(self.owner).serializer
        type.__setattr__(self.owner, "__pydantic_serializer__", serializer)
        return serializer
