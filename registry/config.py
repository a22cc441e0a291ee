"""OperationConfig: the frozen, tagged base of every operation's config, and what it accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import ConfigError, shown
from .other_names import other_name

__all__ = ["OperationConfig", "explain_validation"]


class OperationConfig(BaseModel):
    """Base of the operation configs: frozen, hashable, no unknown fields.

    A field that was never given is unset (`config.is_set`), which is not None: unset lets attnops choose, None asks
    for the kernel's own default. Equality, hash and JSON keep the difference.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    # metadata's blocksize_* defaults -> the field of this config that they feed
    feeds: ClassVar[Mapping[str, str]] = {}

    operation: str
    schema_version: Literal[1] = 1

    def is_set(self, field: str) -> bool:
        """Whether the field was given, be it as None."""
        return field in self.model_fields_set

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that were given, with the operation's tag; `coerce` of it gives an equal config."""
        tag = {"operation": self.operation, "schema_version": self.schema_version}
        return tag | self.model_dump(mode="json", exclude_unset=True)

    def with_fields(self, changes: Mapping[str, Any]) -> Self:
        """Return a validated copy with some fields changed."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).coerce(given | dict(changes))

    @classmethod
    def coerce(cls, value: Self | Mapping[str, Any] | object) -> Self:
        """Take a config, a dict, or any object with fields or attributes of these names.

        Errors: ConfigError for unknown names (with the nearest known one) and for values that make no sense. An
        object's attributes are all read: one that isn't a field is refused, not passed over.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, OperationConfig):
            raise ConfigError(
                f"{type(value).__name__} is the config of {shown(value.operation)}, wanted {cls.__name__}."
            )
        fields = value if isinstance(value, Mapping) else _attributes(value)
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {explain_validation(error, cls)}") from None

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, OperationConfig):
            return NotImplemented
        return self.__dict__ == other.__dict__ and self._given() == other._given()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.__dict__.values()), self._given()))

    def _given(self) -> frozenset[str]:
        # The tag and the version carry no choice: given or not, they say the same.
        return frozenset(self.model_fields_set) - {"operation", "schema_version"}


def explain_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """Turn pydantic's report into one line: what was got, what is wanted, the nearest name for a typo."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "value"
        if item["type"] == "extra_forbidden":
            known = _names(model, item["loc"][:-1])
            close = other_name(item["loc"][-1], known, str(item["loc"][-2]) if len(item["loc"]) == 2 else "")
            lines.append(
                f"unknown field {shown(where)}" + (f"; wanted one of {', '.join(known)}." if known else ".") + close
            )
        elif item["type"] == "missing":
            lines.append(f"{where} is missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] == "value_error" else f"{where}={shown(item['input'])}: "
            lines.append(got + message)
    return "; ".join(lines)


def _names(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The fields of the (nested) model at `path`, or nothing where it isn't a model."""
    for part in path:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        options = getattr(annotation, "__args__", (annotation,))
        nested = [a for a in options if isinstance(a, type) and issubclass(a, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return sorted(model.model_fields)


def _attributes(value: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if hasattr(value, "__dict__"):
        return {k: v for k, v in vars(value).items() if not k.startswith("_")}
    raise ConfigError(f"got {shown(value)}; wanted a config, a dict, or an object with attributes.")
