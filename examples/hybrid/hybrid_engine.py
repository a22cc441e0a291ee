"""The engine that the served example's loop drives, for a hybrid model."""

from __future__ import annotations

from typing import Any

import jax
from hybrid_parts import Weights
from hybrid_serving import Batch, Steps
from step_engine import Sampled, StepEngine, greedy

from attnops.operators.paged_cache import CacheState, init


def engine(steps: Steps, weights: Weights, *, budget: int = 64) -> StepEngine:
    """An engine on one device with two programs: of a token for each row, and of `budget` tokens."""

    def step(
        weights: Weights,
        state: CacheState,
        tokens: jax.Array,
        positions: jax.Array,
        wanted: jax.Array,
        *batches: Any,
        max_q_len: int | None,
    ) -> tuple[Sampled, CacheState]:
        logits, state = steps(weights, state, Batch(tokens, positions, *batches), max_q_len=max_q_len)
        return greedy(logits[wanted].T), state

    return StepEngine(step, weights, init(steps.cache), steps.cache.plan().require(), budget=budget, few=True)
