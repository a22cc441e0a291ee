"""The fields of OperationMetadata other than the policy: type, kind, default, name in a config, and documentation of each."""

# ruff: noqa: RUF009 - _declared returns a dataclass field, which ruff can't see
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..errors import ConfigError
from ..planning.operation_config import OperationConfig
from ..sharding import AnyPartitionAxis, current_mesh
from ..sharding.mesh import AnyMesh
from ..sharding.partition_axis import eformers_axis
from . import kinds
from .unset import UNSET, Unset

if TYPE_CHECKING:
    from eformer.escale import PartitionManager
else:  # for who reads annotations in a running program
    PartitionManager = Any

__all__ = ["MetadataFields", "ReadAs"]

Value = TypeVar("Value", covariant=True)
Accepted = TypeVar("Accepted", contravariant=True)


class Declared(Protocol[Value, Accepted]):
    """A field, for type checkers: reading it gives `Value`; the constructor accepts `Accepted`, or UNSET if it isn't given."""

    def __get__(self, instance: Any, owner: Any = None) -> Value: ...

    def __set__(self, instance: Any, value: Accepted | Unset) -> None: ...


def _declared(
    kind: kinds.Kind | None,
    default: Any,
    doc: str,
    *,
    pickup: str | None = None,
    read: Callable[[Any], Any] | None = None,
) -> Any:
    """kind: the values it accepts; default: its default; pickup: its name in a base_config; read: see ReadAs."""
    metadata = {"kind": kind, "default": default, "doc": doc, "pickup": pickup, "read": read}
    return dataclasses.field(default=UNSET, metadata=metadata)


class ReadAs:
    """An attribute that is stored as given, and read as `read(object)`."""

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self.name, self.read = name, read

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return UNSET if instance is None else self.read(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value


def _mesh(metadata: Any) -> AnyMesh | None:
    stored = vars(metadata)["mesh"]
    return current_mesh() if stored is None else stored


def _manager(metadata: Any) -> PartitionManager:
    # Only here is eformer imported: who reads this asks for its object. Making one registers it as eformer's last one.
    try:
        from eformer.escale import PartitionManager
    except ModuleNotFoundError as error:
        if error.name != "eformer":
            raise
        raise ConfigError(
            "partition_manager is an eformer PartitionManager, and eformer isn't installed; read partition_axis, or "
            "pip install eformer."
        ) from error
    return PartitionManager(eformers_axis(metadata.partition_axis))


@dataclasses.dataclass(frozen=True, eq=False)
class MetadataFields:
    """All fields except base_config and partition_manager can be in files. A new field needs a line here, and a reader."""

    # fmt: off
    runtime_dtype: Declared[np.dtype | None, Any] = _declared(
        kinds.DTYPE_OR_NONE, None, "Dtype of q, k, v inside the operation and of its output. None: the query's dtype.",
        pickup="attn_dtype")
    runtime_softmax_dtype: Declared[np.dtype, Any] = _declared(
        kinds.DTYPE, None, "Dtype of logits and softmax. Default: float32.", pickup="attn_softmax_dtype")
    sequence_axis_name: Declared[str, str] = _declared(
        kinds.TEXT, UNSET, "Mesh axis of the sequence. Default: partition_axis.sequence_parallel_axis.",
        pickup="sequence_axis_name")
    platform: Declared[str | None, str | None] = _declared(
        kinds.PLATFORM, None,
        "The expected platform ('tpu', 'cuda', 'rocm', 'gpu', 'cpu'). A mesh on another platform is an error.",
        pickup="platform")
    backend: Declared[str | None, str | None] = _declared(
        kinds.PLATFORM, None, "The platform to plan for if there is no mesh with devices. Default: jax's.", pickup="backend")
    partition_axis: Declared[AnyPartitionAxis, AnyPartitionAxis | Mapping[str, Any]] = _declared(
        kinds.AXES, UNSET, "A PartitionAxis, attnops' or eformer's, or a dict of its fields.", pickup="partition_axis")
    partition_manager: Declared[PartitionManager, PartitionManager] = _declared(
        None, UNSET, "An eformer PartitionManager, as an alternative to partition_axis. Reading it imports eformer.",
        read=_manager)
    base_config: Any = dataclasses.field(
        default=None, metadata={"doc": "Any config object. Arguments that are not given are taken from its attributes."})
    operation_configs: Declared[Mapping[str, OperationConfig], Mapping[str, Any] | None] = _declared(
        kinds.CONFIGS, None, "{operation name: config, dict or object}.", pickup="operation_configs")
    mesh: Declared[AnyMesh | None, AnyMesh | Mapping[str, int] | None] = _declared(
        kinds.MESH, None, "A Mesh, an AbstractMesh, {axis: size}, or an object of axis_names, axis_sizes, axis_types, platform, "
        "device_kind. Default: the context's mesh at each call.", pickup="mesh", read=_mesh)
    softmax_scale: Declared[float | None, float | None] = _declared(
        kinds.NUMBER_OR_NONE, None, "Factor applied once to q.k. None: 1/sqrt(head_dim).")
    dropout_prob: Declared[float, float] = _declared(
        kinds.PROBABILITY, 0.0, "Probability of dropping an attention weight, in [0, 1).")
    causal: Declared[bool, bool] = _declared(kinds.FLAG, True, "Whether a call without a Mask object is causal.")
    scan_ring_attention: bool | None = None  # Policy's field; listed here for its position among the arguments
    blocksize_q: Declared[int | None, int | None] = _declared(
        kinds.BLOCK, None, "Block size of queries, for operation configs that declare none.")
    blocksize_k: Declared[int | None, int | None] = _declared(
        kinds.BLOCK, None, "Block size of keys, for operation configs that declare none.")
    blocksize_b: Declared[int | None, int | None] = _declared(
        kinds.BLOCK, None, "Block size of the batch, for operation configs that declare none.")
    # fmt: on
