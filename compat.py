"""Differences between JAX 0.9 and later: dropped fields of trees, axes that an array varies over, devices that aren't here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractDevice

__all__ = ["InconclusiveSize", "abstract_device", "platform_of", "tree_of", "varies_over", "varying_as"]

_Class = TypeVar("_Class")

_NAMED = "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct).parameters
_INCONCLUSIVE = "InconclusiveDimensionOperation"  # in jax.core until it moved to jax.errors
# What a comparison of symbolic dimensions raises if they don't decide it.
InconclusiveSize: type[Exception] = getattr(
    jax.errors if hasattr(jax.errors, _INCONCLUSIVE) else jax.core, _INCONCLUSIVE
)
_WITH_PLATFORM = "platform" in inspect.signature(AbstractDevice).parameters
# Prefix of the device kind -> platform, for devices that don't state their platform.
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
    """Register a dataclass as a tree of the fields `data`. Fields in `dropped` aren't part of it, and are restored as their
    defaults."""

    def register(kind: type[_Class]) -> type[_Class]:
        fields: Any = dropped
        try:
            return jax.tree_util.register_dataclass(kind, data, [], drop_fields=fields)
        except ValueError:  # JAX 0.9 treats each letter of a name as a field
            return jax.tree_util.register_dataclass(kind, data, [], drop_fields=[fields])

    return register


def varies_over(x: Any) -> frozenset[str]:
    """The manual mesh axes that an array is known to vary over."""
    kind: Any = jax.typeof(x)
    axes: frozenset[str] = kind.manual_axis_type.varying if _NAMED else kind.vma
    return axes


def varying_as(x: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape struct of a kernel's output, which varies over the same mesh axes as the array x."""
    kind: Any = jax.typeof(x)
    how: dict[str, Any] = {"manual_axis_type": kind.manual_axis_type} if _NAMED else {"vma": kind.vma}
    return jax.ShapeDtypeStruct(shape, dtype, **how)


def abstract_device(kind: str, cores: int | None, platform: str) -> AbstractDevice:
    """A device that needn't be here. If JAX's class has no platform, the kind implies it: see platform_of."""
    if _WITH_PLATFORM:
        return AbstractDevice(kind, cores, platform)
    bare: Any = AbstractDevice
    device: AbstractDevice = bare(kind, cores)
    return device


def platform_of(device: AbstractDevice) -> str:
    """The platform of an abstract device: as stated, or else by the prefix of its kind, or else the kind itself."""
    if _WITH_PLATFORM:
        return device.platform
    kind = device.device_kind.lower()
    return next((platform for start, platform in _KINDS if kind.startswith(start)), kind)
