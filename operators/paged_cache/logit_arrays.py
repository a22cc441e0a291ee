"""LogitArrays: what a step has for its logits besides query and keys: sinks, its score's arrays, which keys tokens may see; or the
weights of an indexer's heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...scores import Score
from ...scores.steps import Lowering, Steps

__all__ = ["LogitArrays", "by_place"]


class LogitArrays(NamedTuple):
    """sinks [heads], the score's arrays as given, and selected int32 [tokens, n]; for a step that selects index_weights [tokens,
    heads]; draft_tree bool [rows, drafts, drafts]."""

    sinks: Any = None
    captures: tuple[Any, ...] = ()
    selected: Any = None
    index_weights: Any = None
    draft_tree: Any = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of the score's arrays."""
        return tuple(x.ndim for x in self.captures)

    def of_shard(self, index: Any) -> LogitArrays:
        """Where several devices have pages of one sequence: a sink counts once, so the others have -inf, which weighs nothing."""
        return self if self.sinks is None else self._replace(sinks=jnp.where(index == 0, self.sinks, -jnp.inf))


def by_place(score: Score | None, captures: Sequence[jax.Array]) -> tuple[Steps | None, tuple[jax.Array, ...]]:
    """The steps of a score by the positions of each pair, and their arrays."""
    if score is None:
        return None, ()
    lowering = Lowering.by_place(np.dtype(np.float32))
    score.lower(captures, lowering)
    return lowering.result()
