"""LatentDims: the sizes of a multi-head latent attention."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from ..planning.unset_fields import UnsetFieldsModel
from .call_declaration import Size

__all__ = ["FORMS", "Form", "LatentDims"]

Form = Literal["expanded", "absorbed"]
FORMS: tuple[Form, ...] = ("expanded", "absorbed")


class LatentDims(UnsetFieldsModel):
    """The sizes of a latent attention. form: 'expanded' makes keys and values for each head, 'absorbed' attends to the latents;
    if unset, the plan chooses. Source: DeepSeek-AI, "DeepSeek-V2" (2024).
    """

    model_config = ConfigDict(title="latent")

    heads: Size
    nope_dim: Size
    rope_dim: Size
    value_dim: Size
    latent_dim: Size
    form: Form | None = None

    @property
    def head_dim(self) -> int:
        """The width of a query, and of an expanded key."""
        return self.nope_dim + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """The default scale, that of the expanded form."""
        return float(self.head_dim**-0.5)

    def inner(self, form: Form) -> tuple[int, int, int]:
        """(kv heads, head dim, value dim) of the attention that a form runs."""
        if form == "expanded":
            return self.heads, self.head_dim, self.value_dim
        return 1, self.latent_dim + self.rope_dim, self.latent_dim
