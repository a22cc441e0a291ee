"""From the products of a tile to its logits: cap, score, bias and mask; and back, for the gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.lse import LOG2E
from ...kernels.plain_sums import plain_vjp
from ...kernels.scores import apply_steps
from .score_tile import TileScores

__all__ = ["weigh"]


def weigh(tile: Any, raw: jax.Array, masked: int) -> tuple[jax.Array, float, Callable[[jax.Array], jax.Array]]:
    """(x, factor, pull): logits in base 2 are x * factor, factor > 0; pull: from the gradient of the logits in base e to that
    of the products times the scale. tile: a Tile, or another kernel's tile with its methods."""
    logits, score, tanh = tile.logits, tile.static_args.score, functools.partial(_tanh, tile)
    capped = scored = None
    x, factor = raw, logits.scale
    if "key_scale" in tile.refs:
        x = x * tile.key_scale()
    if logits.soft_cap is not None:
        x = capped = tanh(x, factor / logits.soft_cap)
        factor = logits.soft_cap
    if score is None:
        factor *= LOG2E
    else:
        scored = apply_steps(score, x, factor, LOG2E, TileScores(tile), tanh=tanh, vjp=plain_vjp)
        x, factor = scored.x, scored.factor * (1.0 if scored.absorbed else LOG2E)
    if "bias" in tile.refs:
        x, factor = x * factor + tile.dense("bias").astype(jnp.float32) * LOG2E, 1.0
    if factor <= 0:
        x, factor = x * factor, 1.0
    for seen in tile.visible() if masked else ():
        x = jnp.where(jnp.broadcast_to(seen, tile.shape), x, -jnp.inf)

    def pull(gradient: jax.Array) -> jax.Array:
        if scored is not None:
            gradient, _ = scored.pull(gradient)
        return gradient if capped is None else gradient * (1.0 - capped * capped)

    return x, factor, pull


def _tanh(tile: Any, x: jax.Array, scale: float = 1.0) -> jax.Array:
    """Of x * scale. Computed from the exponential: a GPU has no exact instruction for it, and Triton would require a library that
    isn't installed. A reciprocal takes fewer instructions than another quotient."""
    return 1.0 - 2.0 * tile.reciprocal(1.0 + jnp.exp2(x * (2 * LOG2E * scale)))
