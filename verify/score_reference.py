"""The scores of the reference: their definition in float64 NumPy, and its derivatives by jax in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..planning.score_operands import captured_names
from ..scores import Score
from ..scores.places import Places

__all__ = ["PlacedScore", "placed_score"]

_DRAWS = 48


def placed_score(
    score: Score | None,
    captures: Mapping[str, Any] | None,
    offset: int | np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    key_offset: int = 0,
) -> PlacedScore | None:
    """A call's score for query [batch, q, heads, dim] and key [batch, kv, kv_heads, dim], and the positions of their first."""
    if score is None:
        return None
    (batch, q_len, heads), kv_len = np.shape(query)[:3], np.shape(key)[1]
    rows = np.arange(q_len)[None] + np.reshape(np.asarray(offset), (-1, 1))
    return PlacedScore.of(
        score.with_heads(heads), captures or {}, rows, np.arange(kv_len)[None] + key_offset, batch=batch, heads=heads
    )


class PlacedScore(NamedTuple):
    """A score with its arrays in float64, and the places of the logits that it is applied to."""

    score: Score
    arrays: tuple[np.ndarray, ...]
    at: Places

    @classmethod
    def of(
        cls,
        score: Score,
        captures: Mapping[str, Any],
        q_positions: np.ndarray,
        kv_positions: np.ndarray,
        *,
        batch: int = 1,
        heads: int = 1,
        first_batch: int = 0,
        first_head: int = 0,
    ) -> PlacedScore:
        """captures: by name, in the shapes of a call; positions: [batch | 1, q] and [batch | 1, kv]."""
        held = zip(captured_names(score), score.arrays(), strict=True)
        arrays = [np.asarray(captures.get(name, x), np.float64) for name, x in held]
        at = Places(
            np.arange(first_batch, first_batch + batch)[:, None, None, None],
            np.arange(first_head, first_head + heads)[None, :, None, None],
            q_positions[:, None, :, None],
            kv_positions[:, None, None, :],
        )
        return cls(score.structure(), tuple(arrays), at)

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """New logits from those after the soft cap."""
        return np.asarray(self.score.apply(logits, self.at, self.arrays, np))

    def squares(self, logits: np.ndarray, squared: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The sums of the squared terms of `derivatives`, from the squares of the terms of the gradient after it.

        Terms of random signs have a sum whose square is, on average, the sum of their squares.
        """
        slope, _ = self.derivatives(logits, np.ones_like(logits))
        rng = np.random.default_rng(0)
        sums = {name: np.zeros(x.shape) for name, x in zip(captured_names(self.score), self.arrays, strict=True)}
        for _ in range(_DRAWS if sums else 0):
            signs = rng.choice(np.asarray([-1.0, 1.0]), squared.shape)
            _, drawn = self.derivatives(logits, np.sqrt(squared) * signs)
            sums = {name: sums[name] + x**2 / _DRAWS for name, x in drawn.items()}
        return squared * slope**2, sums

    def derivatives(self, logits: np.ndarray, d_logits: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the gradient of the logits before the score, those of its arrays) from the gradient after it."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            at = Places(*(jnp.asarray(x) for x in self.at))
            inputs = jnp.asarray(logits), [jnp.asarray(x) for x in self.arrays]
            _, back = jax.vjp(lambda x, arrays: self.score.apply(x, at, arrays, jnp), *inputs)
            d_raw, d_arrays = back(jnp.asarray(d_logits))
        names = captured_names(self.score)
        return np.asarray(d_raw), {name: np.asarray(x) for name, x in zip(names, d_arrays, strict=True)}
