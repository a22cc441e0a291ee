"""What a target's name means: a rival that is installed, a function of a module, or an operation of attnops."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from ..authoring import Operation
from ..distribution import VERSION
from ..errors import ConfigError, UnknownNameError, nearest, shown
from ..operators.recurrent import RecurrentOperation
from ..registry import OperationMetadata, OperationRegistry
from .convention import Convention, built_in_conventions, convention_named
from .family import AttentionFamily, Family
from .recurrence import RecurrenceFamily
from .source import Subject

__all__ = ["family_of", "rivals", "subject_named", "versions_of"]

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def rivals() -> tuple[str, ...]:
    """Names of other libraries' functions, installed or not."""
    return tuple(name for name in built_in_conventions() if convention_named(name).target)


def subject_named(target: str, convention: str | None = None) -> Subject:
    """The subject of a target and the name of a convention, or a TOML file of one; a rival and an operation have their own.

    Errors: ConfigError, UnknownNameError: what can't be found, with the package to install where it is known.
    """
    if target in rivals():
        own = convention_named(target)
        declared = own if convention is None else convention_named(convention)
        _required(own)
        return Subject(target, declared, (_import_line(own.target),))
    if ":" in target:
        if convention is None:
            raise ConfigError(
                f"{shown(target)} without a convention; say how it is called with --as: "
                f"{', '.join(built_in_conventions())}, or a .toml file."
            )
        if not _FUNCTION.fullmatch(target):
            raise ConfigError(f"target {shown(target)}; wanted module:function, such as mylib.attention:attend.")
        return Subject(target, convention_named(convention), (_import_line(target),))
    if convention not in (None, "attnops"):
        raise ConfigError(f"--as {convention} with {shown(target)}; operations of attnops have their own convention.")
    return _operation(target)


def _import_line(target: str) -> str:
    """The line that defines f. Whether it can be imported is found out by the worker."""
    module, _, attribute = target.partition(":")
    if "." not in attribute:
        return f"from {module} import {attribute} as f"
    return f"import {module}; f = {module}.{attribute}"


def _required(convention: Convention) -> None:
    top = convention.target.partition(":")[0].partition(".")[0]
    if importlib.util.find_spec(top) is None:
        raise ConfigError(
            f"no module {top} here; wanted the package {convention.package}: pip install {convention.package}"
        )


def _operation(target: str) -> Subject:
    name, _, method = target.partition(".")
    if name not in OperationRegistry.names():
        known = (*OperationRegistry.names(), *rivals())
        raise UnknownNameError(
            f"no target {shown(target)}; wanted an operation of attnops, module:function with --as, or one of "
            f"{', '.join(rivals())}.{nearest(target, known)}"
        )
    operation: Any = OperationRegistry.get(name)
    if issubclass(operation, RecurrentOperation) and not method:
        convention = Convention(
            name="attnops", about="docs/how-to/recurrent.md", package="attnops", family="recurrence"
        )
        return Subject(target, convention, ("import attnops", f'f = attnops.OperationRegistry.create("{name}")'))
    if not issubclass(operation, Operation):
        raise ConfigError(
            f"{target} has no certificate: those of operations over pages and slots, of indexers and of a recurrence's kernel "
            "aren't written; certify an operation on query, key and value, or a recurrent one."
        )
    changes: dict[str, Any] = {"fallback": "error"}
    if method:
        methods = operation.declared_methods()
        if method not in methods:
            raise UnknownNameError(
                f"{name} has no {shown(method)}; wanted {', '.join(methods)}.{nearest(method, methods)}"
            )
        changes |= _forcing(operation, method)
        x = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32)
        ran = OperationRegistry.create(name, OperationMetadata(**changes)).plan(x, x, x).method
        if ran != method:
            raise ConfigError(
                f"{target} doesn't run here, {name} runs {ran}; certify {name} where there is such a device."
            )
    arguments = ", ".join(f"{field}={value!r}" for field, value in changes.items())
    create = f'f = attnops.OperationRegistry.create("{name}", attnops.OperationMetadata({arguments}))'
    return Subject(target, convention_named("attnops"), ("import attnops", create))


def _forcing(operation: Any, method: str) -> dict[str, Any]:
    """Fields of the metadata with which a method runs here: a kernel in Pallas' interpreter."""
    config = operation.implementation(method, None).config
    if config is not None and "interpret" in config.model_fields:
        return {"operation_configs": {config.model_fields["operation"].default: {"interpret": True}}}
    return {"backend": "cpu"} if method == "forward_native" else {}


def family_of(subject: Subject) -> Family:
    """The cases of a subject."""
    if subject.convention.family == "recurrence":
        return RecurrenceFamily(subject, OperationRegistry.get(subject.name))
    return AttentionFamily(subject)


def versions_of(subject: Subject) -> dict[str, str]:
    """Versions of the target's package, of jax or torch, and of attnops, whose reference judges."""
    convention: Convention = subject.convention
    names = [convention.package.partition("[")[0], "torch" if convention.framework == "torch" else "jax", "numpy"]
    found = {}
    for name in dict.fromkeys(names):
        if name and name != "attnops":
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found | {"attnops": VERSION}
