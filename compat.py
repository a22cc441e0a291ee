"""What JAX 0.9 spells in another way: trees with parts left out, axes over which an array varies, devices that aren't here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractDevice

__all__ = ["abstract_device", "platform_of", "tree_of", "varies_over", "varying_as"]

_Class = TypeVar("_Class")

_NAMED = "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct).parameters
_WITH_PLATFORM = "platform" in inspect.signature(AbstractDevice).parameters
# What device kinds begin with, where a device doesn't say its platform.
_KINDS = (
    ("tpu", "tpu"),
    ("cpu", "cpu"),
    ("nvidia", "gpu"),
    ("cuda", "gpu"),
    ("amd", "gpu"),
    ("rocm", "gpu"),
    ("gpu", "gpu"),
)


def tree_of(data: Sequence[str], *, dropped: Sequence[str]) -> Callable[[type[_Class]], type[_Class]]:
    """Register a dataclass as a tree of the fields `data`; those `dropped` are no part of it and come back as their default."""

    def register(kind: type[_Class]) -> type[_Class]:
        fields: Any = dropped
        try:
            return jax.tree_util.register_dataclass(kind, data, [], drop_fields=fields)
        except ValueError:  # JAX 0.9 takes each letter of a name for a field
            return jax.tree_util.register_dataclass(kind, data, [], drop_fields=[fields])

    return register


def varies_over(x: Any) -> frozenset[str]:
    """The manual mesh axes over which an array is known to vary."""
    kind: Any = jax.typeof(x)
    found: frozenset[str] = kind.manual_axis_type.varying if _NAMED else kind.vma
    return found


def varying_as(x: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A kernel's output of this shape and dtype, which varies over the axes over which the array x does."""
    kind: Any = jax.typeof(x)
    how: dict[str, Any] = {"manual_axis_type": kind.manual_axis_type} if _NAMED else {"vma": kind.vma}
    return jax.ShapeDtypeStruct(shape, dtype, **how)


def abstract_device(kind: str, cores: int | None, platform: str) -> AbstractDevice:
    """A device that needn't be here. Where JAX's has no platform, its kind has to tell it: see platform_of."""
    if _WITH_PLATFORM:
        return AbstractDevice(kind, cores, platform)
    bare: Any = AbstractDevice
    made: AbstractDevice = bare(kind, cores)
    return made


def platform_of(device: AbstractDevice) -> str:
    """The platform of an abstract device: what it says, or else what its kind begins with; for others the kind."""
    if _WITH_PLATFORM:
        return device.platform
    kind = device.device_kind.lower()
    return next((platform for start, platform in _KINDS if kind.startswith(start)), kind)
