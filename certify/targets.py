"""What a target's name means: a rival that is installed, a function of a module, or an operation of attnops."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import jax
import jax.numpy as jnp

from ..distribution import VERSION
from ..errors import ConfigError, UnknownNameError, nearest, shown
from ..planning.operation import PLATFORM_METHODS
from ..registry import OperationMetadata, OperationRegistry
from .convention import Convention, built_in_conventions, convention_named
from .source import Subject

__all__ = ["rivals", "subject_named", "versions_of"]

_LATENT = "latent"
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
    if name == _LATENT:
        return _latent(target, method)
    if name not in OperationRegistry.names():
        known = (*OperationRegistry.names(), *rivals())
        raise UnknownNameError(
            f"no target {shown(target)}; wanted an operation of attnops, latent, module:function with --as, or one of "
            f"{', '.join(rivals())}.{nearest(target, known)}"
        )
    operation: Any = OperationRegistry.get(name)
    convention = operation.convention
    if convention is None:
        raise ConfigError(
            f"{target} has no certificate: no convention of attnops says how {operation.__name__} is called."
        )
    changes: dict[str, Any] = {"fallback": "error"}
    define = []
    if method:
        methods = operation.declared_methods()
        if method not in methods:
            raise UnknownNameError(
                f"{name} has no {shown(method)}; wanted {', '.join(methods)}.{nearest(method, methods)}"
            )
        changes = _forcing(operation, method)  # a step that only writes may fall back
        define = ["from attnops.certify.forced import only", f'f = only("{method}", f)']
        if convention == "attnops":
            changes |= {"fallback": "error"}
            x = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32)
            ran = OperationRegistry.create(name, OperationMetadata(**changes)).plan(x, x, x).method
            if ran != method:
                raise ConfigError(
                    f"{target} doesn't run here, {name} runs {ran}; certify {name} where there is such a device."
                )
            define = []
    arguments = ", ".join(f"{field}={value!r}" for field, value in changes.items())
    create = f'f = attnops.OperationRegistry.create("{name}", attnops.OperationMetadata({arguments}))'
    return Subject(target, _with_layout(convention_named(convention), operation), ("import attnops", create, *define))


def _with_layout(convention: Convention, operation: Any) -> Convention:
    """The convention of an operation whose name stands for one layout of pages."""
    layout = operation.cache_layout
    if layout is None:
        return convention
    if layout == "latent":
        raise ConfigError(
            f"{operation.name} is paged over latents alone; wanted paged, whose feature latent is the same: "
            "attnops certify paged --feature latent."
        )
    cannot = convention.cannot | {
        "layout_of_pages": "the name stands for one layout",
        "latent": "the name stands for one layout",
    }
    return convention.model_copy(update={"always": (*convention.always, f"@ layout='{layout}'"), "cannot": cannot})


def _latent(target: str, inside: str) -> Subject:
    """LatentAttention around an operation on query, key and value."""
    inside = inside or "vanilla"
    whole = [name for name in OperationRegistry.names() if _is_call(OperationRegistry.get(name))]
    if inside not in whole:
        raise UnknownNameError(
            f"no operation {shown(inside)} inside latent attention; wanted {', '.join(whole)}; over pages it is a feature of "
            f"paged.{nearest(inside, whole)}"
        )
    operation: Any = OperationRegistry.get(inside)
    kernel = next((m for m in operation.declared_methods() if _forcing(operation, m).get("operation_configs")), None)
    changes = {"fallback": "error"} | ({} if kernel is None else _forcing(operation, kernel))
    arguments = ", ".join(f"{field}={value!r}" for field, value in changes.items())
    define = (
        f'f = functools.partial(attnops.LatentAttention, "{inside}", metadata=attnops.OperationMetadata({arguments}))'
    )
    return Subject(target, convention_named("attnops:latent"), ("import functools, attnops", define))


def _is_call(operation: Any) -> bool:
    """Whether it attends to keys that are arrays."""
    return operation.family == "attention" and operation.keys_in == "arrays"


def _forcing(operation: Any, method: str) -> dict[str, Any]:
    """Fields of the metadata with which a method runs here: a kernel in Pallas' interpreter."""
    config = operation.implementation(method, None).config
    if method not in PLATFORM_METHODS:
        return {"backend": "cpu"}
    if config is not None and "interpret" in config.model_fields:
        name = config.model_fields["operation"].default
        of_kernel = method.removeprefix("forward_")
        chosen = {"kernel": of_kernel} if of_kernel in _kernels(config) else {}
        return {"operation_configs": {name: {"interpret": True} | chosen}}
    return {}


def _kernels(config: Any) -> tuple[str, ...]:
    """What a config's field `kernel` takes, if it has one."""
    field = config.model_fields.get("kernel")
    literals = () if field is None else (get_args(one) for one in (field.annotation, *get_args(field.annotation)))
    return tuple(value for values in literals for value in values if isinstance(value, str))


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
