"""PartitionAxis: the mesh axes of a model, with the names and defaults of eformer's class; eformer's own is taken as well.

eformer is never imported here. Whoever passes one of its objects, or has registered an axis with it, has loaded it.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ..errors import ConfigError

if TYPE_CHECKING:
    from eformer.escale import PartitionAxis as EformerAxis
    from eformer.escale import PartitionManager
else:  # for who reads annotations in a running program
    EformerAxis = PartitionManager = Any

__all__ = [
    "AXIS_FIELDS", "NOT_GIVEN", "AnyPartitionAxis", "PartitionAxis", "axis_values", "eformers_axis", "is_not_given",
    "is_partition_axis", "is_partition_manager", "registered_axes",
]  # fmt: skip

Axis: TypeAlias = str | tuple[str, ...] | None


class _NotGiven(enum.Enum):
    """An enum with one member, so that it compares, hashes and pickles as itself."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Any = _NotGiven.NOT_GIVEN
"""The value of a field that follows from others. None means that a dimension isn't split."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartitionAxis:
    """Which mesh axes split which dimension, in training and (decode_*) while generating.

    A field is the name of a mesh axis, a tuple of names, or None: not split. The first five name the mesh axes of a kind of
    parallelism; a field that isn't given follows from them. Equal to an eformer PartitionAxis of the same fields.
    Errors: ConfigError for NOT_GIVEN in a field that follows from no other.
    """

    data_parallel_axis: Axis = "dp"
    fully_sharded_data_parallel_axis: Axis = "fsdp"
    tensor_parallel_axis: Axis = "tp"
    sequence_parallel_axis: Axis = "sp"
    expert_parallel_axis: Axis = "ep"
    batch_axis: Axis = NOT_GIVEN
    sequence_axis: Axis = NOT_GIVEN
    query_sequence_axis: Axis = NOT_GIVEN
    head_axis: Axis = NOT_GIVEN
    kv_head_axis: Axis = NOT_GIVEN
    key_sequence_axis: Axis = NOT_GIVEN
    hidden_state_axis: Axis = NOT_GIVEN
    mlp_intermediate_axis: Axis = NOT_GIVEN
    vocab_axis: Axis = NOT_GIVEN
    expert_axis: Axis = NOT_GIVEN
    expert_gate_axis: Axis = None
    attention_dim_axis: Axis = None
    attention_kv_dim_axis: Axis = None
    bias_head_sequence_axis: Axis = None
    bias_key_sequence_axis: Axis = None
    decode_batch_axis: Axis = NOT_GIVEN
    decode_query_sequence_axis: Axis = None
    decode_head_axis: Axis = NOT_GIVEN
    decode_kv_head_axis: Axis = NOT_GIVEN
    decode_key_sequence_axis: Axis = NOT_GIVEN
    decode_attention_dim_axis: Axis = None
    decode_attention_kv_dim_axis: Axis = None

    def __post_init__(self) -> None:
        for name, source in _FOLLOWS.items():
            if is_not_given(getattr(self, name)):
                several = isinstance(source, tuple)
                axes = tuple(getattr(self, field) for field in source) if several else getattr(self, source)
                object.__setattr__(self, name, axes)
        for name in AXIS_FIELDS:
            value = getattr(self, name)
            if is_not_given(value):
                raise ConfigError(
                    f"partition_axis.{name} is not given; wanted a mesh axis, a tuple of them, or None, as it follows from "
                    "no other field."
                )
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    def __eq__(self, other: object) -> bool:
        if type(other) not in (type(self), _loaded("PartitionAxis")):
            return NotImplemented
        return axis_values(self) == axis_values(other)

    def __hash__(self) -> int:
        # As eformer computes it, because objects that are equal have to have equal hashes.
        return hash((type(self).__qualname__, tuple(axis_values(self).items())))


AnyPartitionAxis: TypeAlias = PartitionAxis | EformerAxis


AXIS_FIELDS = tuple(field.name for field in dataclasses.fields(PartitionAxis))
"""The names of the fields, those that others follow from first."""

# What a field that isn't given follows from, which is itself resolved before.
_FOLLOWS: Mapping[str, Any] = {
    "batch_axis": ("fully_sharded_data_parallel_axis", "data_parallel_axis"),
    "sequence_axis": "sequence_parallel_axis",
    "query_sequence_axis": "sequence_parallel_axis",
    "key_sequence_axis": "sequence_parallel_axis",
    "head_axis": "tensor_parallel_axis",
    "kv_head_axis": "tensor_parallel_axis",
    "hidden_state_axis": "tensor_parallel_axis",
    "mlp_intermediate_axis": "tensor_parallel_axis",
    "vocab_axis": "tensor_parallel_axis",
    "expert_axis": "expert_parallel_axis",
    "decode_batch_axis": "batch_axis",
    "decode_head_axis": "head_axis",
    "decode_kv_head_axis": "kv_head_axis",
    "decode_key_sequence_axis": "key_sequence_axis",
}


def _loaded(name: str, module: str = "eformer.escale") -> Any:
    """A name of eformer's, or None if the module isn't loaded."""
    return getattr(sys.modules.get(module), name, None)


def is_not_given(value: object) -> bool:
    """Whether a value is NOT_GIVEN, ours or eformer's."""
    return value is NOT_GIVEN or (value is not None and value is _loaded("NOT_GIVEN", "eformer.common_types"))


def is_partition_axis(value: object) -> TypeGuard[AnyPartitionAxis]:
    """Whether a value is a PartitionAxis, ours or eformer's."""
    eformers = _loaded("PartitionAxis")
    return isinstance(value, PartitionAxis) or (eformers is not None and isinstance(value, eformers))


def is_partition_manager(value: object) -> TypeGuard[PartitionManager]:
    """Whether a value is an eformer PartitionManager."""
    eformers = _loaded("PartitionManager")
    return eformers is not None and isinstance(value, eformers)


def axis_values(axes: Any) -> dict[str, Any]:
    """The values of all fields of a PartitionAxis by name, with tuples for lists."""
    values = {name: getattr(axes, name) for name in AXIS_FIELDS}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def registered_axes() -> Mapping[str, Mapping[str, Any]]:
    """The rules that the user has registered with eformer for the whole process, by semantic axis."""
    eformers = _loaded("PartitionAxis")
    return {} if eformers is None else eformers.get_registered_axes()


def eformers_axis(axes: AnyPartitionAxis) -> EformerAxis:
    """A PartitionAxis as eformer's, which resolves registered axes. eformer has to be loaded."""
    if not isinstance(axes, PartitionAxis):
        return axes
    axis: EformerAxis = _loaded("PartitionAxis")(**axis_values(axes))
    return axis
