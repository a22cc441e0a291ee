"""span_ids: segment ids that let the tokens of one span, such as an image, see each other, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import MaskError
from .int_arrays import int_array

__all__ = ["span_ids"]


def span_ids(spans: Any) -> jax.Array:
    """Ids for `Causal() | SegmentIds(ids, ids)`, or for the place of segment ids in a declared mask.

    spans: int [batch, tokens], the number of each token's span, from 0 up, and negative for tokens that belong to none: these get
    ids of their own, below 0. Errors: MaskError for anything but integers of rank 2.
    """
    int_array(spans, "spans", ("batch", "tokens"))
    if isinstance(spans, jax.ShapeDtypeStruct):
        raise MaskError("spans holds a shape without values; wanted an array.")
    alone = -1 - jnp.arange(spans.shape[1], dtype=jnp.int32)[None]
    return jnp.where(jnp.asarray(spans) < 0, alone, jnp.asarray(spans, jnp.int32))
