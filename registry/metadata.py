"""OperationMetadata: what a model declares once about its attention, in Python or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, Never, Self

import jax
import jax.numpy as jnp
import numpy as np
from eformer.escale import PartitionAxis, PartitionManager
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema

from ..errors import ConfigError, a_type, nearest, shown
from ..planning.config import OperationConfig
from ..planning.other_names import CALL_ARGUMENTS, other_name, refuse_unknown, takes_no_more
from ..planning.plan import Policy
from ..sharding import AttnShardingRules, current_mesh, mesh_to_dict, resolve_rules
from ..sharding.mesh import AnyMesh
from .fields import (
    axis_of,
    block_size,
    boolean,
    configs_of,
    dtype_of,
    listed,
    mesh_of,
    no_twins,
    number,
    partition_axis_of,
    pick,
    platform_of,
    renamed,
)
from .metadata_field import field_json_schema, field_schema
from .model_metadata import arguments_of
from .registry import OperationRegistry
from .unset import UNSET, Unset, or_default

__all__ = ["METADATA_ARGUMENTS", "PICKUP", "OperationMetadata"]

# Where a value comes from when it isn't given: the attribute of base_config that model configs use for it.
PICKUP = {
    "runtime_dtype": "attn_dtype",
    "runtime_softmax_dtype": "attn_softmax_dtype",
    "sequence_axis_name": "sequence_axis_name",
    "platform": "platform",
    "backend": "backend",
    "partition_axis": "partition_axis",
    "operation_configs": "operation_configs",
    "mesh": "mesh",
}
_SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class OperationMetadata:
    """One attention declaration; immutable, hashable, usable as a static argument of jit.

    Args (all keyword or in this order, each may be left out):
        runtime_dtype: dtype of q, k, v inside the operation and of its output; None keeps the query's.
        runtime_softmax_dtype: dtype of logits and softmax; float32 by default.
        sequence_axis_name: mesh axis of the sequence; by default partition_axis.sequence_parallel_axis.
        platform: the platform that is expected ('tpu', 'gpu', 'cuda', 'rocm', 'cpu'); a mesh that disagrees is an error.
        backend: the platform to plan for where there is no mesh with devices; by default jax's default backend.
        partition_axis: eformer PartitionAxis, or a dict of its fields.
        partition_manager: an eformer PartitionManager, as another way to give partition_axis.
        base_config: any config object; a value not given here is taken from its attribute (attn_dtype,
            attn_softmax_dtype, sequence_axis_name, platform, backend, partition_axis, mesh, operation_configs).
        operation_configs: {operation name: config, dict or object}.
        mesh: a Mesh, an AbstractMesh, or {axis: size}; by default the mesh of the context at each call.
        softmax_scale: multiplies q.k once; None is 1/sqrt(head_dim).
        dropout_prob: probability of dropping an attention weight, in [0, 1).
        causal: whether a call without a Mask object is causal.
        scan_ring_attention: lax.scan or unrolled, for operations that run a ring.
        blocksize_q, blocksize_k, blocksize_b: block sizes that operation configs take where they declare none.
        fallback, kv_heads, strict, tuning, sequence_parallel, ring_order: see Policy.

    Errors: ConfigError (a ValueError) names the field, what was got, what is wanted.
    """

    runtime_dtype: np.dtype | None
    runtime_softmax_dtype: np.dtype
    sequence_axis_name: str
    platform: str | None
    backend: str | None
    partition_axis: PartitionAxis
    base_config: Any
    operation_configs: Mapping[str, OperationConfig]
    softmax_scale: float | None
    dropout_prob: float
    causal: bool
    scan_ring_attention: bool | None
    blocksize_q: int | None
    blocksize_k: int | None
    blocksize_b: int | None
    policy: Policy
    _stored_mesh: AnyMesh | None
    _hash: int | None

    @takes_no_more
    def __init__(
        self,
        runtime_dtype: Any = UNSET,
        runtime_softmax_dtype: Any = UNSET,
        sequence_axis_name: str | Unset = UNSET,
        platform: str | Unset | None = UNSET,
        backend: str | Unset | None = UNSET,
        partition_axis: PartitionAxis | Mapping[str, Any] | Unset = UNSET,
        partition_manager: PartitionManager | Unset = UNSET,
        base_config: Any = None,
        operation_configs: Mapping[str, Any] | Unset | None = UNSET,
        mesh: AnyMesh | Mapping[str, int] | Unset | None = UNSET,
        softmax_scale: float | Unset | None = UNSET,
        dropout_prob: float | Unset = UNSET,
        causal: bool | Unset = UNSET,
        scan_ring_attention: bool | Unset | None = UNSET,
        blocksize_q: int | Unset | None = UNSET,
        blocksize_k: int | Unset | None = UNSET,
        blocksize_b: int | Unset | None = UNSET,
        fallback: str = "warn",
        kv_heads: str = "replicate",
        strict: bool = False,
        tuning: str = "heuristic",
        sequence_parallel: str = "auto",
        ring_order: str | None = None,
        **unknown: Never,
    ) -> None:
        given = dict(locals())
        if unknown:
            refuse_unknown(unknown, METADATA_ARGUMENTS, "metadata", CALL_ARGUMENTS)
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen: the one way to assign
        put("base_config", base_config)
        for name in given.keys() - {
            "self",
            "unknown",
            "base_config",
            "partition_manager",
            "mesh",
            "fallback",
            "kv_heads",
            "strict",
            "tuning",
            "sequence_parallel",
            "ring_order",
        }:
            put(name, given[name])
        put("_stored_mesh", mesh)

        if partition_manager is not UNSET:
            axis = partition_manager.paxis
            if partition_axis is not UNSET and axis_of(partition_axis) != axis:
                raise ConfigError("partition_manager and partition_axis disagree; give one of them.")
            put("partition_axis", axis)
        self.set_attrs_carefully("runtime_dtype", None, "attn_dtype")
        self.set_attrs_carefully("runtime_softmax_dtype", jnp.float32, "attn_softmax_dtype")
        axis_given = partition_axis is not UNSET or partition_manager is not UNSET
        self.set_attrs_carefully("partition_axis", UNSET)
        # The axis rules name the sequence axis too, and what is given here beats what base_config says, either way.
        self.set_attrs_carefully("sequence_axis_name", UNSET, use_base_config=not axis_given)
        from_base = None if axis_given else or_default(self.partition_axis, None)
        if sequence_axis_name is not UNSET and from_base is not None:
            put("partition_axis", renamed(axis_of(from_base), sequence_axis_name))
        self.set_attrs_carefully("platform", None)
        self.set_attrs_carefully("backend", None)
        self.set_attrs_carefully("operation_configs", None)
        self.set_attrs_carefully("_stored_mesh", None, "mesh")
        self.set_attrs_carefully("softmax_scale", None, use_base_config=False)
        self.set_attrs_carefully("dropout_prob", 0.0, use_base_config=False)
        self.set_attrs_carefully("causal", True, use_base_config=False)
        for name in ("scan_ring_attention", "blocksize_q", "blocksize_k", "blocksize_b"):
            self.set_attrs_carefully(name, None, use_base_config=False)

        put("runtime_dtype", dtype_of("runtime_dtype", self.runtime_dtype, optional=True))
        softmax_dtype = jnp.float32 if self.runtime_softmax_dtype is None else self.runtime_softmax_dtype
        put("runtime_softmax_dtype", dtype_of("runtime_softmax_dtype", softmax_dtype))
        put("partition_axis", partition_axis_of(self.partition_axis, self.sequence_axis_name))
        put("sequence_axis_name", self.partition_axis.sequence_parallel_axis)
        put("platform", platform_of("platform", self.platform, of_framework=platform is UNSET))
        put("backend", platform_of("backend", self.backend))
        put("operation_configs", configs_of(self.operation_configs))
        put("_stored_mesh", mesh_of(self._stored_mesh))
        put("softmax_scale", number("softmax_scale", self.softmax_scale, optional=True))
        probability = number("dropout_prob", self.dropout_prob)
        if not 0.0 <= probability < 1.0:
            raise ConfigError(f"dropout_prob={probability}; wanted a probability in [0, 1).")
        put("dropout_prob", probability)
        put("causal", boolean("causal", self.causal))
        put("scan_ring_attention", boolean("scan_ring_attention", self.scan_ring_attention, optional=True))
        for name in ("blocksize_q", "blocksize_k", "blocksize_b"):
            put(name, block_size(name, getattr(self, name)))
        policy: Any = (fallback, kv_heads, strict, tuning, sequence_parallel, ring_order, self.scan_ring_attention)
        put("policy", Policy(*policy))
        put("_hash", None)

    # -- where values come from ------------------------------------------------------------------------------------

    def set_attrs_carefully(
        self, attr_name: str, default: Any, pickup_name: str | None = None, use_base_config: bool = True
    ) -> None:
        """Set an attribute that is UNSET: from base_config's `pickup_name` if it has one that is set, else the default.

        An attribute that has a value is left alone. Errors: AttributeError for a name that metadata doesn't have.
        """
        known = {f.name for f in dataclasses.fields(self)} - {"_hash", "policy"}
        if attr_name not in known:
            raise AttributeError(f"OperationMetadata has no attribute {shown(attr_name)}." + nearest(attr_name, known))
        if getattr(self, attr_name) is not UNSET:
            return
        value: Any = UNSET
        if use_base_config and self.base_config is not None:
            value = pick(self.base_config, pickup_name or attr_name)
        object.__setattr__(self, attr_name, default if value is UNSET else value)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        family: str | None = None,
        part: str | None = None,
        ignore: Collection[str] = (),
        **changes: Any,
    ) -> Self:
        """Take what a model's config declares; `changes` come on top.

        config: a Hugging Face config (object, dict, or path of a config.json), of which this is scale, dropout, causality
        and dtype, and a ConfigWarning tells what else its calls need; or any object with the names of base_config.
        family, part, ignore: how to read the former, see read_model_config.
        """
        reading = {"family": family, "part": part, "ignore": ignore}
        return cls(**arguments_of(config, changes, PICKUP, reading))

    @property
    def declared_mesh(self) -> AnyMesh | None:
        """The declared mesh, else the base config's, else None."""
        return self._stored_mesh

    @property
    def mesh(self) -> AnyMesh | None:
        """The declared mesh, else the base config's, else the mesh of the context, else None."""
        stored = self._stored_mesh
        return current_mesh() if stored is None else stored

    @property
    def partition_manager(self) -> PartitionManager:
        """An eformer PartitionManager of partition_axis (making one registers it as eformer's last one)."""
        return PartitionManager(self.partition_axis)

    # -- what follows from it --------------------------------------------------------------------------------------

    def get_shardings(
        self,
        mode: str,
        layout: str = "bthd",
        qkv_mni_sharding: bool = False,
        softmax_aux: jax.Array | np.ndarray | jax.ShapeDtypeStruct | int | None = None,
    ) -> AttnShardingRules:
        """Return the ten PartitionSpecs for a mode and a layout.

        `softmax_aux` is the sinks or their rank. Errors: InputError for an unknown mode or layout.
        """
        ndim = softmax_aux if isinstance(softmax_aux, int) else 0 if softmax_aux is None else len(softmax_aux.shape)
        return resolve_rules(self.partition_axis, mode, layout, qkv_mni_sharding=qkv_mni_sharding, aux_ndim=ndim)

    def get_operation_config(self, impl_name: str) -> OperationConfig | None:
        """Return the config declared for an operation, or None. Errors: UnknownNameError for a name nobody registered."""
        config = self.operation_configs.get(impl_name)
        if config is None and impl_name not in OperationRegistry.names():
            OperationRegistry.get(impl_name)
        return config

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some arguments changed; everything derived from them is derived again."""
        arguments = self._arguments()
        for name in changes:
            if name == "base_config":
                raise ConfigError("replace: base_config can't replace what is declared; use from_config(config, ...).")
            if name not in arguments and name != "partition_manager":
                raise ConfigError(f"replace: unknown argument {shown(name)}." + nearest(name, arguments))
        if "partition_axis" in changes or "partition_manager" in changes:
            arguments["sequence_axis_name"] = UNSET
            if "partition_manager" in changes:
                arguments["partition_axis"] = UNSET
        elif "sequence_axis_name" in changes:
            arguments["partition_axis"] = renamed(self.partition_axis, changes["sequence_axis_name"])
        return type(self)(base_config=self.base_config, **(arguments | changes))

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; `from_dict` of them gives an equal metadata.

        A mesh is written as axis names, sizes, types and platform. base_config is not written: all that was taken
        from it is.
        """
        stored = self._stored_mesh
        data = {name: value for name, value in self._arguments().items() if name not in ("mesh", "sequence_axis_name")}
        data["runtime_dtype"] = None if self.runtime_dtype is None else self.runtime_dtype.name
        data["runtime_softmax_dtype"] = self.runtime_softmax_dtype.name
        data["partition_axis"] = {
            f.name: listed(getattr(self.partition_axis, f.name)) for f in dataclasses.fields(self.partition_axis)
        }
        data["operation_configs"] = {name: config.to_dict() for name, config in self.operation_configs.items()}
        data["mesh"] = None if stored is None else mesh_to_dict(stored)
        return {"schema_version": _SCHEMA_VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build metadata from a dict as `to_dict` writes it; keys may be left out. Errors: ConfigError for unknown ones."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"metadata: got {a_type(data)}; wanted an object of fields.")
        fields = dict(data)
        version = fields.pop("schema_version", _SCHEMA_VERSION)
        if version != _SCHEMA_VERSION:
            raise ConfigError(f"metadata: schema_version={shown(version)}; this attnops reads {_SCHEMA_VERSION}.")
        known = [name for name in METADATA_ARGUMENTS if name not in ("base_config", "partition_manager")]
        for name in fields:
            if name not in known:
                raise ConfigError(
                    f"metadata: unknown field {shown(name)}; wanted {', '.join(known)}."
                    + other_name(name, known, "metadata")
                )
        return cls(**fields)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build metadata from JSON text. Errors: ConfigError with the place where the text is broken."""
        try:
            return cls.from_dict(json.loads(text, object_pairs_hook=no_twins))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"metadata: not JSON at line {error.lineno}, column {error.colno}: {error.msg}."
            ) from None

    # -- pydantic ----------------------------------------------------------------------------------------------------

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Self], handler: GetCoreSchemaHandler) -> CoreSchema:
        del handler
        return field_schema(source)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema
        return field_json_schema(handler)

    # -- identity --------------------------------------------------------------------------------------------------

    def _arguments(self) -> dict[str, Any]:
        return {
            "runtime_dtype": self.runtime_dtype,
            "runtime_softmax_dtype": self.runtime_softmax_dtype,
            "sequence_axis_name": self.sequence_axis_name,
            "platform": self.platform,
            "backend": self.backend,
            "partition_axis": self.partition_axis,
            "operation_configs": self.operation_configs,
            "mesh": self._stored_mesh,
            "softmax_scale": self.softmax_scale,
            "dropout_prob": self.dropout_prob,
            "causal": self.causal,
            "scan_ring_attention": self.scan_ring_attention,
            "blocksize_q": self.blocksize_q,
            "blocksize_k": self.blocksize_k,
            "blocksize_b": self.blocksize_b,
            "fallback": self.policy.fallback,
            "kv_heads": self.policy.kv_heads,
            "strict": self.policy.strict,
            "tuning": self.policy.tuning,
            "sequence_parallel": self.policy.sequence_parallel,
            "ring_order": self.policy.ring_order,
        }

    def _key(self) -> tuple[Any, ...]:
        values = self._arguments()
        values["operation_configs"] = tuple(sorted(self.operation_configs.items()))
        return tuple(values.values())

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, OperationMetadata) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash(self._key()))
        return self._hash or 0

    def __reduce__(self) -> Any:
        # Devices can't be pickled, base_config may not be, and the kept hash is another one in another process.
        return type(self).from_dict, (self.to_dict(),)

    def __copy__(self) -> Self:
        return self  # immutable

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"OperationMetadata({', '.join(f'{k}={v!r}' for k, v in self._arguments().items())})"


# Where pydantic looks at the value and not at the field's type (Any, serialize_as_any), it would write a bare dataclass.
OperationMetadata.__pydantic_serializer__ = TypeAdapter(OperationMetadata).serializer  # type: ignore[attr-defined]
METADATA_ARGUMENTS = tuple(
    name for name in OperationMetadata.__init__.__annotations__ if name not in ("return", "unknown")
)
"""The arguments of OperationMetadata, in order."""
