"""The fields of OperationMetadata, one by one: what is taken, what it becomes, and the message for anything else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eformer.common_types import NOT_GIVEN
from eformer.escale import PartitionAxis
from jax.sharding import AbstractMesh, Mesh

from ..errors import ConfigError, nearest, shown
from ..planning.config import OperationConfig
from ..planning.operation import METHODS
from ..sharding import mesh_from_dict
from ..sharding.mesh import AnyMesh
from .registry import OperationRegistry
from .unset import UNSET, Unset

__all__ = [
    "Configs",
    "axis_of",
    "block_size",
    "boolean",
    "configs_of",
    "dtype_of",
    "listed",
    "mesh_of",
    "no_twins",
    "number",
    "partition_axis_of",
    "pick",
    "platform_of",
    "renamed",
]


class Configs(dict[str, OperationConfig]):
    """The operation configs of a metadata: a dict that doesn't change."""

    def _frozen(self, *args: Any, **changes: Any) -> Any:
        del args, changes
        raise TypeError("operation_configs don't change; use metadata.replace(operation_configs=...).")

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = __ior__ = _frozen

    def __reduce__(self) -> Any:
        return configs_of, (dict(self),)


def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"metadata: {shown(twice)} stands twice in one object; give it once.")
    return fields


def pick(config: Any, name: str) -> Any:
    value = config.get(name, UNSET) if isinstance(config, Mapping) else getattr(config, name, UNSET)
    return UNSET if value is NOT_GIVEN or value is Ellipsis else value


def dtype_of(name: str, value: Any, *, optional: bool = False) -> np.dtype | None:
    if value is None and optional:
        return None
    try:
        # An array is no dtype, though NumPy takes its.
        dtype = None if isinstance(value, jax.Array | np.ndarray | np.generic) else jnp.dtype(value)
    except Exception:  # what NumPy raises depends on what it takes the value for: TypeError, ValueError, SyntaxError
        dtype = None
    if dtype is None:
        raise ConfigError(f"{name}={shown(value)} is not a dtype; wanted for example 'bfloat16' or jnp.float32.")
    if dtype.name not in ("float64", "float32", "bfloat16", "float16"):
        raise ConfigError(f"{name}={dtype.name}; wanted float32, bfloat16, float16 or float64.")
    return jnp.dtype(dtype.name)  # in the machine's byte order


def axis_of(value: PartitionAxis | Mapping[str, Any]) -> PartitionAxis:
    if isinstance(value, PartitionAxis):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"partition_axis={shown(value)}; wanted an eformer PartitionAxis or a dict of its fields.")
    known = [f.name for f in dataclasses.fields(PartitionAxis)]
    for name in value:
        if name not in known:
            raise ConfigError(f"partition_axis: unknown field {shown(name)}." + nearest(name, known))
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
    return PartitionAxis(**given)


def partition_axis_of(value: Any, sequence_axis: str | Unset) -> PartitionAxis:
    if sequence_axis is not UNSET and not isinstance(sequence_axis, str):
        raise ConfigError(f"sequence_axis_name={shown(sequence_axis)}; wanted the name of a mesh axis.")
    if value is UNSET or value is None:
        return PartitionAxis() if sequence_axis is UNSET else PartitionAxis(sequence_parallel_axis=sequence_axis)
    axis = axis_of(value)
    if sequence_axis is not UNSET and axis.sequence_parallel_axis != sequence_axis:
        raise ConfigError(
            f"sequence_axis_name={shown(sequence_axis)} but partition_axis.sequence_parallel_axis="
            f"{shown(axis.sequence_parallel_axis)}; make them agree, or leave sequence_axis_name out."
        )
    return _checked(axis)


def _checked(axis: PartitionAxis) -> PartitionAxis:
    lists: dict[str, Any] = {}
    for field in dataclasses.fields(axis):
        value = getattr(axis, field.name)
        names = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not all(isinstance(n, str) and n for n in names):
            raise ConfigError(
                f"partition_axis.{field.name}={shown(value)}; wanted a mesh axis, a tuple of them, or None."
            )
        if isinstance(value, list):
            lists[field.name] = tuple(value)  # as JSON gives it back, so that the two are equal
    return dataclasses.replace(axis, **lists) if lists else axis


def renamed(axis: PartitionAxis, name: str) -> PartitionAxis:
    """The same axis rules with the sequence axis called otherwise."""
    old = axis.sequence_parallel_axis

    def rename(value: Any) -> Any:
        return tuple(map(rename, value)) if isinstance(value, list | tuple) else name if value == old else value

    return PartitionAxis(**{f.name: rename(getattr(axis, f.name)) for f in dataclasses.fields(axis)})


# What a framework's config may have under `platform`: the language of its kernels, which names no device.
_KERNEL_LANGUAGES = ("jax", "pallas", "triton")


def platform_of(name: str, value: Any, *, of_framework: bool = False) -> str | None:
    """One of METHODS, from its name or an enum of it. A framework's name of a kernel language asks for no platform."""
    value = getattr(value, "value", value)  # enums
    if value is None:
        return None
    text = value.lower() if isinstance(value, str) else ""
    if of_framework and text in _KERNEL_LANGUAGES:
        return None
    if text not in METHODS:
        raise ConfigError(f"{name}={shown(value)}; wanted one of {', '.join(METHODS)}." + nearest(text, METHODS))
    return text


def configs_of(value: Any) -> Mapping[str, OperationConfig]:
    if value is None:
        return Configs()
    if not isinstance(value, Mapping):
        raise ConfigError(f"operation_configs={shown(value)}; wanted a mapping of operation name to config.")
    return Configs({str(n): OperationRegistry.get(str(n)).config.coerce(c) for n, c in value.items()})


def mesh_of(value: Any) -> AnyMesh | None:
    if value is None or isinstance(value, Mesh | AbstractMesh):
        return None if value is not None and value.empty else value
    if isinstance(value, Mapping):
        if "axis_names" in value or "axis_sizes" in value:
            return mesh_from_dict(value)
        return mesh_from_dict({"axis_names": list(value), "axis_sizes": list(value.values())})
    raise ConfigError(f"mesh={shown(value)}; wanted a jax.sharding.Mesh, an AbstractMesh, or {{axis: size}}.")


def number(name: str, value: Any, *, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise ConfigError(f"{name}={shown(value)}; wanted a number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{name}={shown(value)}; wanted a finite number.")
    return number


def boolean(name: str, value: Any, *, optional: bool = False) -> bool | None:
    if value is None and optional:
        return None
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}={shown(value)}; wanted True or False.")
    return bool(value)


def block_size(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name}={shown(value)}; wanted a positive integer.")
    return int(value)


def listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
