"""LatentDims: the sizes of a multi-head latent attention."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, StrictBool, model_validator

from ..planning.cache.kv_cache import KVCache
from ..planning.unset_fields import UnsetFieldsModel
from .call_declaration import Size

__all__ = ["FORMS", "Form", "LatentDims"]

Form = Literal["expanded", "absorbed"]
FORMS: tuple[Form, ...] = ("expanded", "absorbed")


class LatentDims(UnsetFieldsModel):
    """The sizes of a latent attention. form: 'expanded' makes keys and values for each head, 'absorbed' attends to the latents;
    if unset, the plan chooses. Source: DeepSeek-AI, "DeepSeek-V2" (2024).

    query_latent_dim: queries are made of latents of their own, of this size. rope_pairs: which numbers of a query rotate
    together, i and i + rope_dim / 2 ('halves', the default) or 2i and 2i + 1 ('interleaved'). fold_query: whether the absorbed
    form multiplies the projections of queries and keys with each other first; if unset, the plan chooses.
    """

    model_config = ConfigDict(title="latent")

    heads: Size
    nope_dim: Size
    rope_dim: Size
    value_dim: Size
    latent_dim: Size
    form: Form | None = None
    query_latent_dim: Size | None = None
    rope_pairs: Literal["halves", "interleaved"] | None = None
    fold_query: StrictBool | None = None

    @model_validator(mode="after")
    def _queries(self) -> Self:
        if self.query_latent_dim is None:
            for name in ("rope_pairs", "fold_query"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is declared without query_latent_dim, whose queries it is about")
        elif self.rope_dim % 2:
            raise ValueError(
                f"rope_dim={self.rope_dim} with query_latent_dim; wanted an even size, as numbers rotate in pairs"
            )
        if self.fold_query is not None and self.form == "expanded":
            raise ValueError("fold_query with form='expanded', whose queries are made by one product; leave it out")
        return self

    @property
    def head_dim(self) -> int:
        """The width of a query, and of an expanded key."""
        return self.nope_dim + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """The default scale, that of the expanded form."""
        return float(self.head_dim**-0.5)

    def cache_problem(self, cache: KVCache, layer: int | None = None) -> str | None:
        """Why a layer of a cache can't hold these latents, in words, or None. Without a layer, any group of layers may."""
        if self.form == "expanded":
            return "latent.form is 'expanded' beside a cache, whose pages hold latents; leave form out"
        _, head_dim, value_dim = self.inner("absorbed")
        with_pages = [number for number, group in enumerate(cache.groups) if not group.of_states]
        groups = with_pages if layer is None else [cache.group_of(layer)]
        parts = [part for number in groups if (part := cache.part(number, 1)).kind == "latent"]
        if not parts:
            return "the cache beside latent holds keys and values; declare its kind 'latent'"
        found = [(part.head_dim, part.value_size) for part in parts]
        if (head_dim, value_dim) in found:
            return None
        return (
            f"the cache's latents have head_dim={found[0][0]} and value_dim={found[0][1]}; wanted {head_dim}, latent_dim and "
            f"rope_dim together, and {value_dim}, latent_dim"
        )

    def inner(self, form: Form) -> tuple[int, int, int]:
        """(kv heads, head dim, value dim) of the attention that a form runs."""
        if form == "expanded":
            return self.heads, self.head_dim, self.value_dim
        return 1, self.latent_dim + self.rope_dim, self.latent_dim
