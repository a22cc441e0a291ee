"""OperationRegistry: operations by name, found through entry points and imported when asked for."""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..errors import ConfigError, UnknownNameError, nearest

if TYPE_CHECKING:
    from ..operators.base import Operation
    from .metadata import OperationMetadata

__all__ = ["GROUP", "OperationRegistry"]

GROUP = "attnops.operations"
C = TypeVar("C", bound=type)


class OperationRegistry:
    """The operations that exist. Built-ins and plug-ins alike stand in the entry-point group `attnops.operations`."""

    _registered: ClassVar[dict[str, type[Operation]]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def register(cls, operation: C | None = None, *, override: bool = False) -> Any:
        """Add an operation class under its `name`. Use as `@OperationRegistry.register` or with override=True.

        Errors: ConfigError for a class that isn't a complete operation, or a name that is taken.
        """
        if operation is None:
            return functools.partial(cls.register, override=override)
        name = _check(operation)
        with cls._lock:
            known = cls._registered.get(name)
            taken = known if known is not None else name in _entry_points() and _entry_points()[name].value
            if taken and not override and not _same(taken, operation):
                raise ConfigError(f"operation {name!r} exists already ({taken}); register with override=True to replace it.")
            cls._registered[name] = operation
        return operation

    @classmethod
    def get(cls, name: str) -> type[Operation]:
        """Return the class of that name, importing it if need be.

        Errors: UnknownNameError with the known names and the closest one; ConfigError, naming the plug-in, if its
        import fails (the other operations are not touched by that).
        """
        found = cls._registered.get(name)
        if found is not None:
            return found
        entry = _entry_points().get(name)
        if entry is None:
            names = cls.names()
            raise UnknownNameError(
                f"operation {name!r} is not registered; known: {', '.join(names) or 'none (is attnops installed?)'}."
                + nearest(str(name), names)
            )
        try:
            operation = entry.load()
        except Exception as error:  # a plug-in can fail in any way; its name is what the user needs
            where = f"{entry.value}" + (f" of {entry.dist.name}" if entry.dist else "")
            raise ConfigError(f"operation {name!r} ({where}) can't be imported: {type(error).__name__}: {error}") from error
        declared = _check(operation)
        if declared != name:
            raise ConfigError(f"entry point {name!r} ({entry.value}) is an operation named {declared!r}; make them agree.")
        with cls._lock:
            return cls._registered.setdefault(name, operation)

    @classmethod
    def create(cls, name: str, metadata: OperationMetadata | None = None) -> Operation:
        """Return an instance: `get(name)(metadata)`."""
        return cls.get(name)(metadata)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all operations, sorted; imports none of them."""
        return tuple(sorted(cls._registered.keys() | _entry_points().keys()))

    @classmethod
    def unregister(cls, name: str) -> None:
        """Take an operation registered in this process out again. Errors: UnknownNameError."""
        with cls._lock:
            if cls._registered.pop(name, None) is None:
                raise UnknownNameError(f"operation {name!r} was not registered in this process.")


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def _same(taken: Any, operation: type) -> bool:
    """Whether the name is taken by this very class (a module loaded by its entry point registers itself)."""
    where = f"{operation.__module__}:{operation.__qualname__}"
    return taken == where or (isinstance(taken, type) and f"{taken.__module__}:{taken.__qualname__}" == where)


def _check(operation: Any) -> str:
    name = getattr(operation, "name", None)
    if not isinstance(operation, type) or not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise ConfigError(f"{operation!r} is not an operation class; wanted one with a `name` of letters, digits and _.")
    for attribute in ("config", "forward_native"):
        if not hasattr(operation, attribute):
            raise ConfigError(f"operation {name!r} has no `{attribute}`; see docs/add-an-operation.md.")
    operation.declared_methods()  # a method without declared abilities is an error now, not at the first call
    return name

