"""From the products of queries and keys to the logits of a sub-tile: cap, score, bias and mask; and back, for the gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...kernels.scores import Pull, Share, apply_steps
from .score_tile import SubTileScores
from .subtiles import SubTile
from .tile import Tile

__all__ = ["weigh"]


def weigh(tile: Tile, raw: jax.Array, subtile: SubTile) -> tuple[jax.Array, Pull]:
    """(logits, times log2 e if base2; from their gradient to that of the products) from a sub-tile's products."""
    logits, unit, score = tile.logits, tile.logits.exp_factor, tile.static_args.score
    # The scale of a quantised key goes into the factor, one number per key: logits need no extra work.
    of_keys = tile.key_scale(subtile) if "key_scale" in tile.refs else 1.0
    x, factor = raw, logits.scale
    capped = scored = None
    if logits.soft_cap is not None:
        x = capped = jnp.tanh(raw * (of_keys * (logits.scale / logits.soft_cap)))
        of_keys, factor = 1.0, logits.soft_cap
    if score is None:
        x = x * (of_keys * (factor * unit))
    else:
        x = x if isinstance(of_keys, float) else x * of_keys
        scored = apply_steps(score, x, factor, unit, SubTileScores(tile, subtile))
        rest = scored.factor * (1.0 if scored.absorbed else unit)
        x = scored.x if rest == 1.0 else scored.x * rest
    if "bias" in tile.refs:
        x = x + tile.dense("bias", subtile).astype(jnp.float32) * unit

    def pull(gradient: jax.Array) -> tuple[jax.Array, list[Share]]:
        shares: list[Share] = []
        if scored is not None:
            gradient, shares = scored.pull(gradient)
        return gradient if capped is None else gradient * (1.0 - capped * capped), shares

    return (tile.hide(x, subtile) if subtile.masked else x), pull
