"""Gates of recurrences: what a model projects for a token becomes a log decay, a step, and the strength of an update.

A step is the projection, or softplus(projection + bias), clipped. The log decay is rate * step; without a rate it is the step.
Where `steps` is declared, values are multiplied by it, as Mamba's are. These functions run on XLA and inside kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .convolution import Convolution

__all__ = ["ROLES", "Gates", "Ungated", "normalised", "step_of", "strength_of"]


ROLES = ("query", "key", "value")
"""What may be convolved."""


class Gates(NamedTuple):
    """What is static. normalise_eps: under the root of the norms that queries and keys are divided by, None if they aren't.
    softplus, least, most: of the step. steps: whether values are multiplied by it. beta_max: that times the sigmoid of beta is an
    update's strength; None if beta is."""

    normalise_eps: float | None = None
    softplus: bool = False
    least: float | None = None
    most: float | None = None
    steps: bool = False
    beta_max: float | None = None


class Ungated(NamedTuple):
    """Arrays as a model passes them, with any dims before those named. query, key [key_heads, dim]; value [heads, value_dim];
    decay [heads] or [heads, dim]; beta [heads], for the delta rule; and without other dims rate [heads], bias as decay; skip
    [heads], what the value itself counts in the output. convolved: the convolutions of query, key and value, None for none."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    beta: jax.Array | None = None
    rate: jax.Array | None = None
    bias: jax.Array | None = None
    skip: jax.Array | None = None
    convolved: tuple[Convolution | None, ...] = (None, None, None)


def normalised(x: Any, eps: float) -> Any:
    """Rows divided by their norms, in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + np.float32(eps))


def step_of(gates: Gates, projected: Any, bias: Any) -> Any:
    """The step in float32. bias: of the same rank, or None."""
    step = projected.astype(jnp.float32)
    if bias is not None:
        step = step + bias.astype(jnp.float32)
    if gates.softplus:
        step = jax.nn.softplus(step)
    if gates.least is not None:
        step = jnp.maximum(step, np.float32(gates.least))
    return step if gates.most is None else jnp.minimum(step, np.float32(gates.most))


def strength_of(gates: Gates, beta: Any) -> Any:
    """The strength of an update in float32."""
    wide = beta.astype(jnp.float32)
    return wide if gates.beta_max is None else np.float32(gates.beta_max) * jax.nn.sigmoid(wide)
