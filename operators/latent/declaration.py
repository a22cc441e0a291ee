"""LatentDeclaration: the contents of a latent attention's JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, ValidationError, model_validator

from ...errors import ConfigError, a_type
from ...planning.unset_fields import UnsetFieldsModel, explain_validation
from ...registry.declaration import Declaration
from ...strict_json import parse_json, read_text
from .dims import LatentDims

__all__ = ["LatentDeclaration"]

_FOLLOWS = ("q_heads", "kv_heads", "head_dim", "value_dim")


class LatentDeclaration(UnsetFieldsModel):
    """A latent attention: its sizes, and the declaration of the attention between its projections, whose heads and dims follow.

    Errors of all constructors: ConfigError that names the field, the value and what is expected.
    """

    model_config = ConfigDict(title="attnops latent declaration")

    tags: ClassVar = frozenset({"schema_version"})

    schema_version: Literal[1] = 1
    latent: LatentDims
    attention: Declaration

    @model_validator(mode="after")
    def _sizes_follow(self) -> Self:
        call = self.attention.call
        given = [name for name in _FOLLOWS if name in call.model_fields_set]
        if given or self.attention.in_pages:
            what = f"attention.call.{given[0]}" if given else f"attention.operation {self.attention.operation!r}"
            wanted = "none, as it follows from latent" if given else "an operation on arrays"
            raise ValueError(f"{what} is declared; wanted {wanted}")
        return self

    @classmethod
    def read(cls, source: LatentDeclaration | Mapping[str, Any] | str | Path) -> LatentDeclaration:
        """A declaration itself, its dict, or the path of its JSON file."""
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return cls._of(source, "latent declaration")
        if isinstance(source, str | Path):
            return cls._of(
                parse_json(read_text(Path(source), "a JSON file with a latent declaration"), str(source)), str(source)
            )
        raise ConfigError(
            f"got {a_type(source)}; wanted an operation's name, a LatentDeclaration, its dict, or a path."
        )

    @classmethod
    def _of(cls, fields: Any, source: str) -> LatentDeclaration:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{source}: {explain_validation(error, cls)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given, as JSON-ready values."""
        return self.model_dump(mode="json", by_alias=True)

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)
