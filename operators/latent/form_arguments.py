"""The call inside a declared latent attention, as the arguments of its operation."""

from __future__ import annotations

from typing import Any

from ...registry.declaration import Declaration
from ...registry.latent_dims import Form
from ..call.key_columns import KeyColumns

__all__ = ["form_arguments"]


def form_arguments(declaration: Declaration, form: Form, mode: str | None = None) -> dict[str, Any]:
    """Shapes and options of the call that a declaration's latent attention makes in this form. In the absorbed one values are the
    first numbers of the keys."""
    assert declaration.latent is not None
    inside = declaration.of_form(form)
    arguments = inside.call_arguments(inside.shapes(), mode=mode)
    return arguments | ({"value": KeyColumns(declaration.latent.latent_dim)} if form == "absorbed" else {})
