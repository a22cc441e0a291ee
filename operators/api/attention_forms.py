"""An Attention in other forms: a field of a pydantic model, and HTML for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

from ...errors import AttnOpsError, ConfigError
from ...pydantic_fields import value_schema
from ...registry.declaration import Declaration

__all__ = ["attention_html", "attention_schema"]


def attention_schema(cls: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """The schema of a field that holds a `cls`, or what declares one."""
    declaration = handler.generate_schema(Declaration)

    def read(value: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Declaration | Mapping):
            raise ConfigError(
                f"got {type(value).__name__}; wanted an Attention, a Declaration, or an object of its fields."
            )
        try:
            return cls(value)
        except AttnOpsError as error:  # some aren't a ValueError, which pydantic requires
            raise ValueError(str(error)) from None

    return value_schema(cls, f"a {cls.__name__}", read, lambda value: value.declared(), declaration, declaration)


def attention_html(declared: Declaration, plans: Iterable[Any]) -> str:
    """The declaration, its mask and score, and the plans of the calls so far."""
    from ...drawing.html import code, fragment, heading, pictures, rows

    mask, score = declared.call.mask, declared.call.score
    planned = [("plan", f"{p.implementation or 'refused'}: {p.problem.describe()}") for p in plans]
    drawn = [] if mask is None else [pictures([mask.draw().svg()])]
    if score is not None and all(x is not None for x in score.with_heads(1).arrays()):
        drawn.append(pictures([score.draw(heads=declared.call.q_heads).svg()]))
    return fragment([heading("Attention"), code(declared.to_json()), *drawn, rows(planned)])
