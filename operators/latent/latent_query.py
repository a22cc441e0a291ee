"""The queries of latent attention, as given or made of their latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ...registry.latent_dims import LatentDims
from .forms import absorbed_query, folded_query, made_query

__all__ = ["absorbed", "expanded"]

_MADE_OF = ("query_latent", "w_uq", "q_cos", "q_sin")


def expanded(dims: LatentDims, arrays: Mapping[str, Any], layout: str) -> tuple[jax.Array, jax.Array]:
    """(q_nope, q_rope)."""
    if dims.query_latent_dim is None:
        return arrays["q_nope"], arrays["q_rope"]
    return made_query(*(arrays[name] for name in _MADE_OF), pairs=dims.rope_pairs or "halves", layout=layout)


def absorbed(dims: LatentDims, arrays: Mapping[str, Any], layout: str, folded: bool) -> jax.Array | None:
    """The query that latents and rotary keys are multiplied with; None for a step without queries."""
    if arrays["q_nope" if dims.query_latent_dim is None else "query_latent"] is None:
        return None
    if folded:
        made_of = (arrays[name] for name in _MADE_OF)
        return folded_query(*made_of, arrays["w_uk"], pairs=dims.rope_pairs or "halves", layout=layout)
    return absorbed_query(*expanded(dims, arrays, layout), arrays["w_uk"], layout=layout)
