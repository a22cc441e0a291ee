"""UnsetFieldsModel: a pydantic model that serialises only the fields that were given, because unset differs from None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticSerializationUnexpectedValue, core_schema
from pydantic_core.core_schema import SerializationInfo

from ..errors import ConfigError, a_type, shown
from ..names import unprintable
from .other_names import other_name

__all__ = ["UnsetFieldsModel", "explain_validation", "models_of"]

_Model = TypeVar("_Model", bound=BaseModel)


if TYPE_CHECKING:  # type checkers get the fields of a model from pydantic's metaclass
    from pydantic._internal._model_construction import ModelMetaclass as _Explaining
else:

    class _Explaining(type(BaseModel)):
        """Makes a model's constructor raise ConfigError with attnops' messages. Validation methods don't use this."""

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                title = cls.model_config.get("title") or cls.__name__
                raise ConfigError(f"{title}: {explain_validation(error, cls)}") from None


class UnsetFieldsModel(BaseModel, metaclass=_Explaining):
    """Frozen, hashable if its values are, without unknown fields. Validation and serialisation keep which fields were given.

    Serialisation (model_dump, model_dump_json, also inside another model) always writes the given fields and those of `tags`,
    and no others, even with exclude_unset, exclude_none or exclude_defaults: a None that was given, or a value that equals the
    default, is a choice, and without it the declaration would have another meaning. include and exclude work as usual. An
    instance is validated again wherever it is passed as a value, because model_copy and model_construct don't validate.
    """

    # Populate by name too: when an instance is validated again, its fields have their names.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always", populate_by_name=True
    )

    @model_validator(mode="after")
    def _printable(self) -> Self:
        for name, value in self.__dict__.items():
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and (character := unprintable(text)) is not None:
                    raise ValueError(f"{name}={shown(text)} holds {character}; wanted printable characters only")
        return self

    # Fields that identify the data. They are always written, and whether they were given doesn't affect equality.
    tags: ClassVar[frozenset[str]] = frozenset()

    def is_set(self, field: str) -> bool:
        """Whether the field was given, even as None."""
        return field in self.model_fields_set

    def checked(self) -> Self:
        """Return a validated copy: model_copy and model_construct don't validate. Errors: ConfigError."""
        try:
            return type(self).model_validate(self)
        except ValidationError as error:
            raise ConfigError(
                f"{self.model_config.get('title') or type(self).__name__}: {explain_validation(error, type(self))}"
            ) from None

    def every_field(self) -> dict[str, Any]:
        """The JSON values of all fields, including those that weren't given."""
        whole = self.model_copy(update={name: getattr(self, name) for name in type(self).model_fields})
        return whole.model_dump(mode="json")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        if cls.__pydantic_complete__:  # the class's own schema, which this method has already changed
            return schema

        def write(value: Any, fields: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
            return _without_unset(cls, value, fields, info)

        written = core_schema.wrap_serializer_function_ser_schema(write, info_arg=True)
        return {**schema, "serialization": written}

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, UnsetFieldsModel):
            return NotImplemented
        return self.__dict__ == other.__dict__ and self._choices() == other._choices()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.__dict__.values()), self._choices()))

    def _choices(self) -> frozenset[str]:
        return frozenset(self.model_fields_set) - self.tags

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:  # type: ignore[override]
        """pydantic's model_construct, which doesn't validate, but an unknown name is kept, so that it is refused on use."""
        model = super().model_construct(_fields_set, **values)
        model.__dict__.update({name: value for name, value in values.items() if name not in _names(cls)})
        return model


def _without_unset(
    cls: type[UnsetFieldsModel], value: Any, fields: SerializerFunctionWrapHandler, info: SerializationInfo
) -> dict[str, Any]:
    if not isinstance(value, cls):  # pydantic tries the branches of a union in turn
        raise PydanticSerializationUnexpectedValue(f"a {type(value).__name__} is not a {cls.__name__}")
    if type(value) is not cls or info.exclude_unset or info.exclude_none or info.exclude_defaults:
        include: Any = info.include
        exclude: Any = info.exclude
        return value.model_dump(  # the instance's own fields, and all that were given
            mode=info.mode,
            include=include,
            exclude=exclude,
            context=info.context,
            by_alias=info.by_alias,
            round_trip=info.round_trip,
        )
    set_fields = value.model_fields_set | cls.tags
    known: Mapping[str, Any] = cls.model_fields
    unset = {
        key for name, field in known.items() if name not in set_fields for key in (name, field.serialization_alias)
    }
    return {key: item for key, item in fields(value).items() if key not in unset}


def _names(cls: type[UnsetFieldsModel]) -> set[str]:
    known: Mapping[str, Any] = cls.model_fields
    return {key for name, field in known.items() for key in (name, field.alias) if key}


def models_of(values: Iterable[Any], model: type[_Model], name: str, example: str) -> tuple[_Model, ...]:
    """The items of a list as models. name: of the field; example: of an item. Errors: ValueError that names the item."""
    made = []
    for number, item in enumerate(values):
        if not isinstance(item, model | dict):
            raise ValueError(f"{name}[{number}] is {a_type(item)}; wanted an object such as {example}")
        try:
            made.append(model.model_validate(item))
        except ValidationError as error:
            raise ValueError(f"{name}[{number}]: {explain_validation(error, model)}") from None
    return tuple(made)


def explain_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """Turn pydantic's report into one line: the value, what is expected, and the nearest name for a typo."""
    lines: list[str] = []
    listed: set[tuple[Any, ...]] = set()  # models whose fields a line has named already
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "value"
        if item["type"] == "extra_forbidden":
            known = _fields_at(model, item["loc"][:-1])
            close = other_name(item["loc"][-1], known, str(item["loc"][-2]) if len(item["loc"]) == 2 else "")
            expected = f"; wanted one of {', '.join(known)}." if known and item["loc"][:-1] not in listed else "."
            listed.add(item["loc"][:-1])
            lines.append(f"unknown field {shown(where)}{expected}{close}")
        elif item["type"] == "missing":
            lines.append(f"{where} is missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] == "value_error" else f"{where}={shown(item['input'])}: "
            lines.append(got + message)
    return "; ".join([*(line.removesuffix(".") for line in lines[:-1]), *lines[-1:]])


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The fields of the (nested) model at `path`; [] if it isn't a model."""
    for part in path:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        options = getattr(annotation, "__args__", (annotation,))
        nested = [a for a in options if isinstance(a, type) and issubclass(a, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return sorted(model.model_fields)
