"""What is imported or made when it is first needed: modules, and what pydantic writes a value with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["LazyModule", "LazySerializer", "lazy_names", "lazy_schema"]


def lazy_names(package: str, files: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names, each with the file in the package that has it, and modules are imported when
    they are first read."""

    def __getattr__(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in files:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{files[name]}"), name)
        return vars(sys.modules[package]).setdefault(name, value)

    return __getattr__


class LazyModule:
    """A module that is imported when one of its names is first read. Type checkers see the import under TYPE_CHECKING."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:  # only of names that weren't read before
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)
        return value


def lazy_schema(owner: Any, module: str) -> Any:
    """Make a class one whose objects are fields of pydantic models, by `field_schema` of the module, which is returned. Module
    and pydantic are imported when a schema is first asked for."""
    schema = LazyModule(module)
    owner.__get_pydantic_core_schema__ = staticmethod(lambda source, handler: schema.field_schema(source, handler))
    owner.__pydantic_serializer__ = LazySerializer(owner)
    return schema


class LazySerializer:
    """A class attribute `__pydantic_serializer__`. pydantic would write a plain dataclass without it, where it goes by the value
    instead of a field's type (Any, serialize_as_any)."""

    def __init__(self, owner: type) -> None:
        self.owner = owner

    def __get__(self, instance: Any, cls: type) -> Any:
        from pydantic import TypeAdapter

        serializer = TypeAdapter(self.owner).serializer
        type.__setattr__(self.owner, "__pydantic_serializer__", serializer)
        return serializer
