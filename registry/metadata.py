"""OperationMetadata: a model's declaration of its attention, in Python or JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import numpy as np
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from ..call_arguments import CALL_ARGUMENTS
from ..errors import ConfigError, a_type, nearest, shown
from ..lazy import LazySerializer
from ..planning.operation_config import OperationConfig
from ..planning.other_names import other_name, refuse_unknown
from ..planning.policy import CHOICES, Policy, with_fields
from ..sharding import AttnShardingRules, resolve_rules
from ..sharding.mesh import AnyMesh
from ..strict_json import parse_json
from .fields import MetadataFields, ReadAs
from .kinds import Kind, joined_axes, names_no_device, pick, renamed
from .metadata_field import field_json_schema, field_schema
from .registry import OperationRegistry
from .unset import UNSET

__all__ = ["METADATA_ARGUMENTS", "PICKUP", "OperationMetadata"]

_SCHEMA_VERSION = 1
T = TypeVar("T")


@dataclass_transform(eq_default=False)
def _declaration(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose constructor refuses unknown keywords with a hint. Its fields define reading and help."""
    frozen_class: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    start = frozen_class.__init__

    @functools.wraps(start)
    def init(self: Any, *args: Any, **arguments: Any) -> None:
        if unknown := [name for name in arguments if name not in METADATA_ARGUMENTS]:
            refuse_unknown(unknown, METADATA_ARGUMENTS, "metadata", CALL_ARGUMENTS)
        start(self, *args, **arguments)

    frozen_class.__init__ = init
    frozen_class.__doc__ = with_fields(frozen_class)
    for field in dataclasses.fields(frozen_class):
        if field.metadata.get("read"):
            setattr(frozen_class, field.name, ReadAs(field.name, field.metadata["read"]))
    return frozen_class


# A dataclass starts with the fields of its last base. It is frozen, but telling mypy so would lose the types for reading.
@_declaration
class OperationMetadata(Policy, MetadataFields):  # type: ignore[misc]
    """A declaration of attention: immutable, hashable, and usable as a static argument of jit.

    Errors: ConfigError (a ValueError) that names the field, the value and what is expected. All arguments are optional, and can
    be passed by keyword or in this order.
    """

    def __post_init__(self) -> None:
        super().__post_init__()  # the policy's
        put, base = self.__dict__, self.base_config
        axis_arguments = put["partition_axis"], put["sequence_axis_name"], put["partition_manager"]
        axes = joined_axes(*axis_arguments, lambda name: pick(base, PICKUP[name]))
        put |= {"partition_axis": axes, "sequence_axis_name": axes.sequence_parallel_axis}
        for name, kind in _KINDS.items():
            field = _FIELDS[name].metadata
            self.set_attrs_carefully(
                name, field["default"], field["pickup"], use_base_config=field["pickup"] is not None
            )
            put[name] = kind.take(name, put[name])

    # -- sources of values -----------------------------------------------------------------------------------------

    def set_attrs_carefully(
        self, attr_name: str, default: Any, pickup_name: str | None = None, use_base_config: bool = True
    ) -> None:
        """Set an attribute that is UNSET, from `pickup_name` of base_config if that is set there, else to the default.

        An attribute that has a value is unchanged. Errors: AttributeError for a name that metadata doesn't have.
        """
        if attr_name not in METADATA_ARGUMENTS:
            raise AttributeError(
                f"OperationMetadata has no attribute {shown(attr_name)}." + nearest(attr_name, METADATA_ARGUMENTS)
            )
        if self.__dict__[attr_name] is not UNSET:
            return
        value: Any = UNSET
        if use_base_config and self.base_config is not None:
            value = pick(self.base_config, pickup_name or attr_name)
        if value is UNSET or (attr_name == "platform" and names_no_device(value)):
            value = default
        self.__dict__[attr_name] = value

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
        """Build metadata from a model's config; `changes` override it.

        config: a Hugging Face config (object, dict, or path of a config.json), or any object with the attributes of base_config.
        From a Hugging Face config, metadata has the scale, dropout, causality and dtype; a ConfigWarning lists what else its
        calls need. family, part, ignore: how to read such a config, see read_model_config.
        """
        reading = {"family": family, "part": part, "ignore": ignore}
        from .model_metadata import arguments_of

        return cls(**arguments_of(config, changes, PICKUP, reading))

    @property
    def declared_mesh(self) -> AnyMesh | None:
        """The declared mesh, else the base config's, else None: then `mesh` is the context's."""
        return self.__dict__["mesh"]

    @functools.cached_property
    def policy(self) -> Policy:
        """The fields of the policy only."""
        return Policy(**{name: getattr(self, name) for name in CHOICES})

    # -- derived values --------------------------------------------------------------------------------------------

    def get_shardings(
        self,
        mode: str,
        layout: str = "bthd",
        qkv_mni_sharding: bool = False,
        softmax_aux: jax.Array | np.ndarray | jax.ShapeDtypeStruct | int | None = None,
    ) -> AttnShardingRules:
        """Return the ten PartitionSpecs for a mode and a layout.

        softmax_aux: the sinks, or their rank. Errors: InputError for an unknown mode or layout.
        """
        ndim = softmax_aux if isinstance(softmax_aux, int) else 0 if softmax_aux is None else len(softmax_aux.shape)
        return resolve_rules(self.partition_axis, mode, layout, qkv_mni_sharding=qkv_mni_sharding, aux_ndim=ndim)

    def get_operation_config(self, impl_name: str) -> OperationConfig | None:
        """Return the config declared for an operation, or None. Errors: UnknownNameError for an unregistered name."""
        config = self.operation_configs.get(impl_name)
        if config is None and impl_name not in OperationRegistry.names():
            OperationRegistry.get(impl_name)
        return config

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some arguments changed. Derived values are derived again."""
        arguments = self._arguments() | {"sequence_axis_name": UNSET}  # follows from partition_axis
        for name in changes:
            if name == "base_config":
                raise ConfigError("replace: base_config can't replace what is declared; use from_config(config, ...).")
            if name not in arguments and name != "partition_manager":
                raise ConfigError(f"replace: unknown argument {shown(name)}." + nearest(name, arguments))
        if "partition_manager" in changes:
            arguments["partition_axis"] = UNSET
        elif "sequence_axis_name" in changes and "partition_axis" not in changes:
            arguments["partition_axis"] = renamed(self.partition_axis, changes["sequence_axis_name"])
        return type(self)(base_config=self.base_config, **(arguments | changes))

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values. `from_dict` of the result gives equal metadata.

        A mesh is written as axis names, sizes, types and platform. base_config is not written, but the values taken
        from it are.
        """
        data = {name: value for name, value in self._arguments().items() if name != "sequence_axis_name"}
        data |= {name: kind.write(data[name]) for name, kind in _KINDS.items() if name in data}
        return {"schema_version": _SCHEMA_VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build metadata from a dict in the form of `to_dict`. Keys may be omitted. Errors: ConfigError for unknown keys."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"metadata: got {a_type(data)}; wanted an object of fields.")
        fields = dict(data)
        version = fields.pop("schema_version", _SCHEMA_VERSION)
        if version != _SCHEMA_VERSION:
            raise ConfigError(f"metadata: schema_version={shown(version)}; this attnops reads {_SCHEMA_VERSION}.")
        for name in fields:
            if name not in _IN_FILES:
                raise ConfigError(
                    f"metadata: unknown field {shown(name)}; wanted {', '.join(_IN_FILES)}."
                    + other_name(name, _IN_FILES, "metadata")
                )
        return cls(**fields)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build metadata from JSON text. Errors: ConfigError with the position of a syntax error."""
        return cls.from_dict(parse_json(text, "metadata"))

    # -- pydantic ----------------------------------------------------------------------------------------------------

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Self], handler: GetCoreSchemaHandler) -> CoreSchema:
        return field_schema(source)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return field_json_schema(cls, handler)

    # -- identity --------------------------------------------------------------------------------------------------

    def _arguments(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _IN_FILES}

    def __eq__(self, other: object) -> bool:
        return self._arguments() == other._arguments() if isinstance(other, OperationMetadata) else NotImplemented

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(self._arguments().values()))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # Devices can't be pickled, base_config perhaps not, and the cached hash would differ in another process.
        return type(self).from_dict, (self.to_dict(),)

    def __copy__(self) -> Self:
        return self  # immutable

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"OperationMetadata({', '.join(f'{k}={v!r}' for k, v in self._arguments().items())})"


_FIELDS = {field.name: field for field in dataclasses.fields(OperationMetadata)}
METADATA_ARGUMENTS = tuple(_FIELDS)
"""The arguments of OperationMetadata, in order."""
_IN_FILES = tuple(name for name in METADATA_ARGUMENTS if name not in ("base_config", "partition_manager"))
_KINDS: dict[str, Kind] = {
    name: field.metadata["kind"] for name, field in _FIELDS.items() if field.metadata.get("kind")
}
PICKUP = {name: field.metadata["pickup"] for name, field in _FIELDS.items() if field.metadata.get("pickup")}
"""The attribute of base_config from which an argument is taken if it isn't given."""
OperationMetadata.__pydantic_serializer__ = LazySerializer(OperationMetadata)  # type: ignore[attr-defined]
