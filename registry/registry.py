"""OperationRegistry: operations by name, found through entry points and imported on first use."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import threading
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Unpack

import jax

from ..call_arguments import CallArguments, CallArray
from ..errors import AttnOpsError, ConfigError, UnknownNameError, a_type, nearest, shown
from ..planning.call_plan import Plan
from ..planning.operation_config import OperationConfig
from ..sharding import OperandTable

__all__ = ["GROUP", "AttentionOperation", "OperationRegistry"]

# What other libraries call these operations.
_OTHER_NAMES = {
    "flash": "flash_attn2",
    "flash_attention": "flash_attn2",
    "flash_attention_2": "flash_attn2",
    "splash_attention": "splash",
    "ring_attention": "ring",
    "paged_attention": "paged",
    "ragged_paged_attention": "paged",
    "cudnn": "sdpa",
    "dot_product": "vanilla",
    "dot_product_attention": "vanilla",
    "eager": "vanilla",
    "native": "vanilla",
    "xla": "vanilla",
}
GROUP = "attnops.operations"
C = TypeVar("C", bound=type)
Family = Literal["attention", "selection", "recurrence"]


class Output(Protocol):
    """The result of a call; operators/call/output.py has the shapes."""

    attention_outputs: jax.Array
    attention_weights: jax.Array | None
    lse: jax.Array | None
    plan: Plan | None


class AttentionOperation(Protocol):
    """The interface of an operation obtained by name; operators/call/base.py implements it, and documents its arguments."""

    name: ClassVar[str]
    config: ClassVar[type[OperationConfig]]
    operands: ClassVar[OperandTable]
    keys_in: ClassVar[Literal["arrays", "pages"]]
    family: ClassVar[Family]

    def __init__(self, metadata: Any = None) -> None: ...

    @property
    def metadata(self) -> Any: ...

    def __call__(self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]) -> Output: ...

    def plan(self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]) -> Plan: ...

    def explain(self, query: CallArray, key: CallArray, value: CallArray, **call: Unpack[CallArguments]) -> str: ...


class OperationRegistry:
    """All operations. Built-ins and plug-ins are both in the entry-point group `attnops.operations`."""

    _registered: ClassVar[dict[str, type[AttentionOperation]]] = {}
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
            taken = [known] if known is not None else [entry.value for entry in _entry_points().get(name, ())]
            # A class from the name's own entry point that registers itself while being imported is that operation.
            same = [operation] if known is not None else [f"{operation.__module__}:{operation.__qualname__}"]
            if taken and taken != same and not override:
                raise ConfigError(
                    f"operation {shown(name)} already exists ({taken[0]}); pass override=True to replace it."
                )
            cls._registered[name] = operation
        return operation

    @classmethod
    def get(cls, name: str) -> type[AttentionOperation]:
        """Return the class of that name, importing it if necessary.

        Errors: UnknownNameError with the known names and the closest one; ConfigError that names the plug-in if its
        import fails (this doesn't affect the other operations).
        """
        if not isinstance(name, str):
            raise UnknownNameError(f"an operation's name must be a string, got {a_type(name)}.")
        registered = cls._registered.get(name)
        if registered is not None:
            return registered
        entries = _entry_points().get(name, ())
        if not entries:
            names = cls.names()
            raise UnknownNameError(
                f"operation {shown(name)} is not registered; known: {', '.join(names) or 'none (is attnops installed?)'}."
                + (f" Did you mean {_OTHER_NAMES[name]!r}?" if name in _OTHER_NAMES else nearest(name, names))
            )
        if len(entries) > 1:
            raise ConfigError(
                f"operation {shown(name)} is provided by {' and by '.join(map(_where, entries))}; uninstall all but one, or "
                "register the one you want with override=True."
            )
        (entry,) = entries
        try:
            operation = entry.load()
        except Exception as error:  # a plug-in can fail in any way; the message has to name it
            text = f"operation {shown(name)} ({_where(entry)}) can't be imported: {type(error).__name__}: {error}"
            raise ConfigError(text) from error
        declared = _check(operation)
        if declared != name:
            raise ConfigError(
                f"entry point {shown(name)} ({entry.value}) is an operation named {shown(declared)}; make them agree."
            )
        with cls._lock:
            return cls._registered.setdefault(name, operation)

    @classmethod
    def create(cls, name: str, metadata: Any = None) -> AttentionOperation:
        """Return an instance: `get(name)(metadata)`."""
        return cls.get(name)(metadata)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all operations, sorted. Imports none of them."""
        return tuple(sorted(cls._registered.keys() | _entry_points().keys()))

    @classmethod
    def configs(cls) -> dict[str, type[OperationConfig]]:
        """The config classes by operation name, except for operations that can't be imported here."""
        configs = {}
        for name in cls.names():
            with contextlib.suppress(AttnOpsError):
                configs[name] = cls.get(name).config
        return configs

    @classmethod
    def unregister(cls, name: str) -> None:
        """Remove an operation that was registered in this process. Errors: UnknownNameError."""
        with cls._lock:
            if cls._registered.pop(name, None) is None:
                raise UnknownNameError(f"operation {shown(name)} was not registered in this process.")


OperationConfig.registry = OperationRegistry


@functools.cache
def _entry_points() -> dict[str, tuple[importlib.metadata.EntryPoint, ...]]:
    """The entry points by name. A name has more than one only if several installed distributions provide it."""
    by_name: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        by_name.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {name: tuple(entries.values()) for name, entries in by_name.items()}


def _where(entry: importlib.metadata.EntryPoint) -> str:
    return entry.value + (f" of {entry.dist.name}" if entry.dist else "")


def _check(given: Any) -> str:
    name = getattr(given, "name", None)
    if not inspect.isclass(given) or not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise ConfigError(
            f"{shown(given)} is not an operation class; wanted one with a `name` of letters, digits and _."
        )
    operation_class: Any = given
    for attribute in ("config", "forward_native", "declared_methods"):
        if not hasattr(operation_class, attribute):
            raise ConfigError(
                f"operation {shown(name)} has no `{attribute}`; wanted an Operation subclass, see docs/add-an-operation.md."
            )
    if not inspect.isclass(operation_class.config) or not issubclass(operation_class.config, OperationConfig):
        raise ConfigError(
            f"operation {shown(name)} has config={shown(operation_class.config)}; wanted a subclass of OperationConfig."
        )
    operation_class.declared_methods()  # so that a method without declared abilities fails now, not at the first call
    return name
