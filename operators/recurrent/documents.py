"""The arrays of a call as implementations get them: in one layout, with what segment ids and lengths mean for each token."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["documents", "moved"]


def moved(x: jax.Array, given: tuple[str, ...], wanted: tuple[str, ...]) -> jax.Array:
    """An array with its dims in another order; a batch of 1 is added or taken away."""
    if "batch" in given and "batch" not in wanted:
        x, given = x[0], given[1:]
    if "batch" in wanted and "batch" not in given:
        x, given = x[None], ("batch", *given)
    return x if given == wanted else jnp.transpose(x, [given.index(dim) for dim in wanted])


def documents(arrays: Mapping[str, jax.Array], over: tuple[str, ...], batch: int, tokens: int) -> dict[str, jax.Array]:
    """What segment ids and lengths mean for each token: its document, counted from 0 at the sequence's start, and that of the
    token before; whether it counts; and for each row, how many tokens do, and the last one's document.

    over: the axes that split the sequence; batch, tokens: those of this device, which tells the next one its last token's id.
    """
    found: dict[str, jax.Array] = {}
    ids, lengths = arrays.get("segment_ids"), arrays.get("lengths")
    here, devices = (lax.axis_index(over), lax.axis_size(over)) if over else (0, 1)
    if lengths is not None or over:
        found["ends"] = (
            jnp.full((batch,), devices * tokens, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
        )
    if lengths is not None:
        places = jnp.arange(tokens, dtype=jnp.int32)[None] + jnp.int32(here) * tokens
        found["valid"] = places < found["ends"][:, None]
    if ids is None:
        return found
    starts = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    if over:
        last = lax.ppermute(ids[:, -1], over, [(n, n + 1) for n in range(devices - 1)])
        starts = starts.at[:, 0].set((last != ids[:, 0]) & (here > 0))
    if lengths is not None:
        starts &= found["valid"]
    document = jnp.cumsum(starts.astype(jnp.int32), 1)
    previous, last_document = jnp.pad(document, ((0, 0), (1, 0)))[:, :-1], document[:, -1]
    if over:
        counts = lax.all_gather(last_document, over)
        before = jnp.sum(jnp.where((jnp.arange(devices) < here)[:, None], counts, 0), 0)[:, None]
        document, previous, last_document = document + before, previous + before, jnp.sum(counts, 0)
    return found | {"document": document, "previous": previous, "last_document": last_document}
