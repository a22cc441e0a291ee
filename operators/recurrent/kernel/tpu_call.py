"""What the forward and the backward kernel of linear attention on TPUs are given."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .tpu_sizes import Sizes

__all__ = ["Arrays", "How", "Kept", "operands_of", "part_of"]


class How(NamedTuple):
    """What is static of a call."""

    sizes: Sizes
    scale: float
    interpret: bool


class Arrays(NamedTuple):
    """The arrays of a call in whole chunks, or what there is for each. query, key [batch, key_heads, tokens, dim]; value [batch,
    heads, tokens, value_dim]; decay [batch, heads, tokens, dim] or None; gates [batch, heads, chunks, n, tokens of a chunk]: the
    log decay of a head, unless each channel has its own, and beta for the delta rule; initial [batch, heads, dim, value_dim] or
    None."""

    query: Any
    key: Any
    value: Any
    decay: Any
    gates: Any
    initial: Any


class Kept(NamedTuple):
    """What a forward pass keeps for its gradient: the state before each chunk [batch, heads, chunks, dim, value_dim]; of the
    delta rule, the inverse [batch, heads, chunks, tokens, tokens], and of each value what its key hadn't seen [batch, heads,
    tokens, value_dim]."""

    states: Any
    inverse: Any
    unseen: Any


def operands_of(arrays: NamedTuple, specs: NamedTuple) -> dict[str, tuple[Any, Any]]:
    """Arrays that there are and their specs, by name."""
    named = zip(arrays._fields, arrays, specs, strict=True)
    return {name: (x, spec) for name, x, spec in named if x is not None}


def part_of(index: Any, count: int) -> Any:
    """index // count of an index of the grid, which is at least 0."""
    return index if count == 1 else lax.div(index, jnp.int32(count))
