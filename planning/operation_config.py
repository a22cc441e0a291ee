"""OperationConfig: the frozen, tagged base class of all operation configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from ..errors import AttnOpsError, ConfigError, shown
from .unset_fields import UnsetFieldsModel, explain_validation

__all__ = ["OperationConfig"]


class Operations(Protocol):
    """What a config needs to know about the existing operations."""

    def names(self) -> tuple[str, ...]:
        """The names of all operations."""
        ...

    def configs(self) -> Mapping[str, type[OperationConfig]]:
        """The config classes by operation name."""
        ...

    def get(self, name: str) -> Any:
        """The class of an operation."""
        ...


class OperationConfig(UnsetFieldsModel):
    """Base class of the operation configs: frozen, hashable, without unknown fields.

    A field that wasn't given is unset (`config.is_set`), which differs from None: unset lets attnops choose, None selects
    the kernel's own default. Equality, hash and JSON keep the difference.

    A subclass sets the default of `operation` to the operation's name. A class that doesn't, such as this one, is not an
    operation's config: as the type of a field it accepts the config of any operation, identified by its tag.
    """

    model_config = ConfigDict(validate_default=True)

    tags: ClassVar = frozenset({"operation", "schema_version"})
    # metadata's blocksize_* default -> the field of this config that it sets
    feeds: ClassVar[Mapping[str, str]] = {}
    registry: ClassVar[Operations]  # set by the registry, which is in a higher layer

    operation: str
    schema_version: Literal[1] = 1

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        if cls._is_abstract():
            raise ConfigError(
                f"{cls.__name__} is not an operation's config; wanted that of one of {', '.join(cls.registry.names())}."
            )
        return super().__new__(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = super().__get_pydantic_core_schema__(source, handler)
        if cls.__pydantic_complete__ or not cls._is_abstract():
            return schema

        def read(value: Any, _: ValidatorFunctionWrapHandler) -> OperationConfig:
            return _by_tag(cls, value)

        return core_schema.no_info_wrap_validator_function(read, schema, serialization=schema["serialization"])

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if not cls._is_abstract():
            return handler(schema)
        known = cls.registry.configs().values()
        of_each = [handler(config.__pydantic_core_schema__) for config in known if issubclass(config, cls)]
        return {"anyOf": of_each, "required": ["operation"]}

    @classmethod
    def _is_abstract(cls) -> bool:
        return cls.__pydantic_fields__["operation"].is_required()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that were given, with the operation's tag. `coerce` of the result gives an equal config."""
        return self.model_dump(mode="json")

    def with_fields(self, changes: Mapping[str, Any]) -> Self:
        """Return a validated copy with some fields changed."""
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).coerce(fields | dict(changes))

    @classmethod
    def coerce(cls, value: Self | Mapping[str, Any] | object) -> Self:
        """Convert a config, a dict, or any object with fields or attributes of these names.

        Errors: ConfigError for unknown names (with the nearest known one) and for invalid values. All attributes of an
        object are read: one that isn't a field is refused, not ignored.
        """
        if isinstance(value, OperationConfig) and not isinstance(value, cls):
            raise ConfigError(
                f"{type(value).__name__} is the config of {shown(value.operation)}, wanted {cls.__name__}."
            )
        data: Any = (
            value if isinstance(value, cls) else dict(value if isinstance(value, Mapping) else _attributes(value))
        )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {explain_validation(error, cls)}") from None


def _by_tag(config_type: type[OperationConfig], value: Any) -> OperationConfig:
    """The config of any operation, from its tag. Errors: ValueError, as pydantic requires."""
    tag = value.get("operation") if isinstance(value, Mapping) else getattr(value, "operation", None)
    if not isinstance(tag, str):
        raise ValueError("no 'operation', which identifies the operation of this config")
    try:
        actual_type = type(value) if isinstance(value, OperationConfig) else config_type.registry.get(tag).config
    except AttnOpsError as error:  # UnknownNameError is a LookupError
        raise ValueError(str(error)) from None
    if not issubclass(actual_type, config_type):
        raise ValueError(f"{actual_type.__name__} is not a {config_type.__name__}")
    return actual_type.model_validate(value)


def _attributes(value: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if hasattr(value, "__dict__"):
        return {k: v for k, v in vars(value).items() if not k.startswith("_")}
    raise ConfigError(f"got {shown(value)}; wanted a config, a dict, or an object with attributes.")
