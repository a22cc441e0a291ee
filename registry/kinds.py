"""Kinds of fields of OperationMetadata: accepted values, conversion, JSON form, and error messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..errors import ConfigError, is_whole, nearest, shown
from ..names import checked_name
from ..planning.operation import METHODS
from ..planning.operation_config import OperationConfig
from ..sharding import AnyPartitionAxis, PartitionAxis, mesh_from_dict, mesh_to_dict
from ..sharding.partition_axis import AXIS_FIELDS, axis_values, is_not_given, is_partition_axis, is_partition_manager
from .registry import OperationRegistry
from .unset import UNSET

__all__ = [
    "AXES", "BLOCK", "CONFIGS", "DTYPE", "DTYPE_OR_NONE", "FLAG", "MESH", "NUMBER_OR_NONE", "PLATFORM", "PROBABILITY", "TEXT",
    "Kind", "joined_axes", "names_no_device", "pick", "renamed",
]  # fmt: skip


class Kind(NamedTuple):
    """`take(name, value)` returns the value to store, or raises ConfigError. `schema` and `write` are for JSON."""

    take: Callable[[str, Any], Any]
    schema: Mapping[str, Any]
    write: Callable[[Any], Any] = lambda value: value


class Configs(dict[str, OperationConfig]):
    """The operation configs of a metadata: an immutable dict."""

    def _frozen(self, *args: Any, **changes: Any) -> Any:
        raise TypeError("operation_configs are immutable; use metadata.replace(operation_configs=...).")

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = __ior__ = _frozen

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return _configs, ("", dict(self))


def pick(config: Any, name: str) -> Any:
    value = config.get(name, UNSET) if isinstance(config, Mapping) else getattr(config, name, UNSET)
    return UNSET if is_not_given(value) or value is Ellipsis else value


def _dtype(name: str, value: Any) -> np.dtype:
    try:
        # Refuse an array, though NumPy would use its dtype.
        dtype = None if isinstance(value, jax.Array | np.ndarray | np.generic) else jnp.dtype(value)
    except Exception:  # NumPy may raise TypeError, ValueError or SyntaxError
        dtype = None
    if dtype is None:
        short = f" Did you mean {_SHORT[value]!r}?" if isinstance(value, str) and value in _SHORT else ""
        raise ConfigError(
            f"{name}={shown(value)} is not a dtype; wanted a dtype such as 'bfloat16' or jnp.float32.{short}"
        )
    if dtype.name not in _FLOATS:
        raise ConfigError(f"{name}={dtype.name}; wanted float32, bfloat16, float16 or float64.")
    return jnp.dtype(dtype.name)  # in the machine's byte order


def _axes(value: Any) -> AnyPartitionAxis:
    if is_partition_axis(value):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"partition_axis={shown(value)}; wanted a PartitionAxis or a dict of its fields.")
    for name in value:
        if name not in AXIS_FIELDS:
            raise ConfigError(f"partition_axis: unknown field {shown(name)}." + nearest(name, AXIS_FIELDS))
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
    return PartitionAxis(**fields)


def joined_axes(axes: Any, name: Any, manager: Any, base: Callable[[str], Any]) -> AnyPartitionAxis:
    """The axis rules with `name` as sequence axis. Given values override those of the base config."""
    if manager is not UNSET:
        if not is_partition_manager(manager):
            raise ConfigError(f"partition_manager={shown(manager)}; wanted an eformer PartitionManager.")
        if axes is not UNSET and _axes(axes) != manager.paxis:
            raise ConfigError("partition_manager and partition_axis disagree; give one of them.")
        axes = manager.paxis
    if axes is UNSET:
        axes = base("partition_axis")
        if name is UNSET:
            name = base("sequence_axis_name")
        elif axes is not UNSET and axes is not None:
            axes = renamed(_axes(axes), name)
    if name is not UNSET and not isinstance(name, str):
        raise ConfigError(f"sequence_axis_name={shown(name)}; wanted the name of a mesh axis.")
    if axes is UNSET or axes is None:
        axes = PartitionAxis() if name is UNSET else PartitionAxis(sequence_parallel_axis=name)
    axes = _axes(axes)
    if name is not UNSET and axes.sequence_parallel_axis != name:
        raise ConfigError(
            f"sequence_axis_name={shown(name)} but partition_axis.sequence_parallel_axis="
            f"{shown(axes.sequence_parallel_axis)}; make them agree, or leave sequence_axis_name out."
        )
    return _checked(axes)


def _checked(axis: AnyPartitionAxis) -> AnyPartitionAxis:
    lists: dict[str, Any] = {}
    for field in dataclasses.fields(axis):
        value = getattr(axis, field.name)
        names = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not all(isinstance(n, str) and n for n in names):
            raise ConfigError(
                f"partition_axis.{field.name}={shown(value)}; wanted a mesh axis, a tuple of them, or None."
            )
        for name in names:
            checked_name(name, f"partition_axis.{field.name}: mesh axis")
        if isinstance(value, list):
            lists[field.name] = tuple(value)  # as read from JSON, so that the two are equal
    return dataclasses.replace(axis, **lists) if lists else axis


def renamed(axis: AnyPartitionAxis, name: str) -> AnyPartitionAxis:
    """The same axis rules with another name for the sequence axis."""
    old: Any = axis.sequence_parallel_axis
    if old is None:  # as are the rules of dimensions that are never split
        whole = PartitionAxis(sequence_parallel_axis=name)
        follow = [field for field in AXIS_FIELDS if getattr(whole, field) == name]
        return dataclasses.replace(axis, **{field: name for field in follow if getattr(axis, field) is None})

    def rename(value: Any) -> Any:
        return tuple(map(rename, value)) if isinstance(value, list | tuple) else name if value == old else value

    return dataclasses.replace(axis, **{field: rename(value) for field, value in axis_values(axis).items()})


def short_axes(axes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a PartitionAxis from which it sets all others itself."""
    partition_axis = _axes(axes)
    short: dict[str, Any] = {}
    for field, value in axis_values(partition_axis).items():  # those that others are set from come first
        if getattr(PartitionAxis(**short), field) != value:
            short[field] = value
    return short


def names_no_device(value: Any) -> bool:
    """Whether the `platform` of a framework's config is the language of its kernels, and so specifies no platform."""
    value = getattr(value, "value", value)  # enums
    return isinstance(value, str) and value.lower() in ("jax", "pallas", "triton")


def _platform(name: str, value: Any) -> str | None:
    value = getattr(value, "value", value)  # enums
    if value is None:
        return None
    text = value.lower() if isinstance(value, str) else ""
    if text not in METHODS:
        raise ConfigError(f"{name}={shown(value)}; wanted one of {', '.join(METHODS)}." + nearest(text, METHODS))
    return text


def _configs(name: str, value: Any) -> Mapping[str, OperationConfig]:
    if value is None:
        return Configs()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={shown(value)}; wanted a mapping of operation name to config.")
    return Configs({str(n): OperationRegistry.get(str(n)).config.coerce(c) for n, c in value.items()})


def _mesh(name: str, value: Any) -> Mesh | AbstractMesh | None:
    if value is None or isinstance(value, Mesh | AbstractMesh):
        return None if value is not None and value.empty else value
    if isinstance(value, Mapping):
        if "axis_names" in value or "axis_sizes" in value:
            return mesh_from_dict(value)
        for axis, size in value.items():
            if not is_whole(size, 1):
                raise ConfigError(
                    f"{name}: the size of axis {shown(axis)} is {shown(size)}; wanted a positive integer, as in "
                    '{"fsdp": 2, "tp": 4}.'
                )
        return mesh_from_dict({"axis_names": list(value), "axis_sizes": list(value.values())})
    raise ConfigError(
        f"{name}={shown(value)}; wanted a jax.sharding.Mesh, an AbstractMesh, or the size of each axis, as in "
        '{"fsdp": 2, "tp": 4}.'
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise ConfigError(f"{name}={shown(value)}; wanted a number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{name}={shown(value)}; wanted a finite number.")
    return number


def _probability(name: str, value: Any) -> float:
    probability = _number(name, value)
    if not 0.0 <= probability < 1.0:
        raise ConfigError(f"{name}={probability}; wanted a probability in [0, 1).")
    return probability


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}={shown(value)}; wanted True or False.")
    return bool(value)


def _block(name: str, value: Any) -> int:
    if not is_whole(value, 1, numpy=True):
        raise ConfigError(f"{name}={shown(value)}; wanted a positive integer.")
    return int(value)


def _or(otherwise: Any, take: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """`take`, but return `otherwise` for None."""
    return lambda name, value: otherwise if value is None else take(name, value)


def _written_axes(axes: AnyPartitionAxis) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in axis_values(axes).items()}


_SHORT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
}
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_AXIS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_RULES = dict.fromkeys(AXIS_FIELDS, _AXIS)


def _object(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "additionalProperties": False}


DTYPE = Kind(_or(jnp.dtype(jnp.float32), _dtype), {"enum": [*_FLOATS]}, lambda dtype: dtype.name)
DTYPE_OR_NONE = Kind(_or(None, _dtype), {"enum": [*_FLOATS, None]}, lambda dtype: dtype and dtype.name)
TEXT = Kind(lambda _, value: value, {"type": "string"})
PLATFORM = Kind(_platform, {"enum": [*METHODS, None]})
AXES = Kind(lambda _, value: value, _object(_RULES), _written_axes)
CONFIGS = Kind(_configs, _object({}), lambda configs: {name: config.to_dict() for name, config in configs.items()})
MESH = Kind(_mesh, {"anyOf": [{"type": "object"}, {"type": "null"}]}, lambda mesh: mesh and mesh_to_dict(mesh))
NUMBER_OR_NONE = Kind(_or(None, _number), {"type": ["number", "null"]})
PROBABILITY = Kind(_probability, {"type": "number", "minimum": 0, "exclusiveMaximum": 1})
FLAG = Kind(_flag, {"type": "boolean"})
BLOCK = Kind(_or(None, _block), {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
