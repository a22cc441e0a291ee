"""LogitArrays: what a step has for its logits besides query and keys: sinks, its score's arrays, which keys tokens may see; or
the weights of an indexer's heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...scores import Score
from ...scores.steps import Lowering, Steps

__all__ = ["LogitArrays", "by_place"]


_BY_ROW = ("selected", "index_weights", "draft_tree", "spans", "prefix_lengths", "q_positions")


class LogitArrays(NamedTuple):
    """sinks [heads], the score's arrays as given, selected int32 [tokens, n]; for a step that selects index_weights [tokens,
    heads]; draft_tree bool [rows, drafts, drafts], spans int32 [tokens, 2], prefix_lengths int32 [rows], q_positions
    int32 [tokens]."""

    sinks: Any = None
    captures: tuple[Any, ...] = ()
    selected: Any = None
    index_weights: Any = None
    draft_tree: Any = None
    spans: Any = None
    prefix_lengths: Any = None
    q_positions: Any = None

    @property
    def by_row(self) -> dict[str, Any]:
        """The arrays whose first dimension counts tokens or rows of the batch, which are split with the pages."""
        return {name: x for name in _BY_ROW if (x := getattr(self, name)) is not None}

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
