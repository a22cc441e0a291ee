"""Training on a mesh: rows of tokens split over dp and sp, weights over tp, the declared operations as they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from hybrid_model import Model
from hybrid_parts import Weights
from hybrid_pasts import Whole
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def loss_of(model: Model, weights: Weights, rows: jax.Array) -> jax.Array:
    """Mean cross entropy in nats of each token of rows [batch, time + 1] given those before it."""
    tokens = rows[:, :-1]
    logits = model(weights, tokens, Whole(model, tokens))
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


class Trainer:
    """Adam on a model's weights, with a learning rate that rises for a tenth of the steps and then falls."""

    def __init__(self, model: Model, weights: Weights, steps: int) -> None:
        schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, max(1, steps // 10), steps, 5e-4)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
        self.model, self.weights, self._state = model, weights, jax.jit(optimizer.init)(weights)

        def step(weights: Weights, state: Any, rows: jax.Array) -> tuple[Weights, Any, jax.Array]:
            loss, gradients = jax.value_and_grad(lambda w: loss_of(model, w, rows))(weights)
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state, loss

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def _put(self, rows: np.ndarray) -> jax.Array:
        mesh = self.model.mesh
        return jax.device_put(rows) if mesh is None else jax.device_put(rows, NamedSharding(mesh, P("dp")))

    def step(self, rows: np.ndarray) -> float:
        """One step on rows int32 [batch, time + 1]; the loss before it."""
        self.weights, self._state, loss = self._step(self.weights, self._state, self._put(rows))
        return float(loss)


def train(trainer: Trainer, rows: Iterator[np.ndarray], steps: int, every: int) -> None:
    """Train, and print the mean loss of every `every` steps."""
    losses = []
    for step, batch in zip(range(1, steps + 1), rows, strict=False):
        losses.append(trainer.step(batch))
        if step % every == 0 or step == steps:
            print(f"step {step:3}: loss {np.mean(losses):.3f}", flush=True)
            losses.clear()
