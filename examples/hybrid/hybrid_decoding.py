"""Decoding from a dense cache of keys and states: chunks of prompts of different lengths, then token by token."""

from __future__ import annotations

import functools

import jax
import numpy as np
from hybrid_model import Model
from hybrid_parts import Weights
from hybrid_pasts import Cache, Dense, empty_cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(model: Model, weights: Weights, cache: Cache, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, Cache]:
    """Logits of tokens int32 [batch, time], of which the first `count` [batch] of each row are new, and the cache after them."""
    past = Dense(model, tokens, cache, count)
    return model(weights, tokens, past), past.cache


def logits_in_parts(model: Model, weights: Weights, rows: np.ndarray, prompts: np.ndarray, chunk: int) -> np.ndarray:
    """The logits of every position of rows int32 [batch, length]: the first `prompts` [batch] tokens in chunks, the others one by
    one, all rows at once. Positions that no row of its prompt and as many steps reaches are 0."""
    batch, length = rows.shape
    cache = empty_cache(model, batch, length + chunk)
    each, found = np.arange(batch), None

    def run(first: np.ndarray, count: np.ndarray, time: int) -> None:
        nonlocal cache, found
        at = np.minimum(first[:, None] + np.arange(time), length - 1)
        logits, cache = step(model, weights, cache, rows[each[:, None], at], count.astype(np.int32))
        found = np.zeros((batch, length, logits.shape[-1]), np.float32) if found is None else found
        for row in range(batch):
            found[row, first[row] : first[row] + count[row]] = logits[row, : count[row]]

    for first in range(0, int(prompts.max()), chunk):
        run(np.full(batch, first), np.clip(prompts - first, 0, chunk), chunk)
    for done in range(length - int(prompts.max())):
        run(prompts + done, np.ones(batch, np.int32), 1)
    assert found is not None
    return found
