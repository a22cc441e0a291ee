"""A call, and a call with its gradient, as programs to compile or to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..operators import Operation
from ..operators.latent import LatentAttention
from ..planning.score_operands import with_captures
from ..sharding import OperandTable

__all__ = ["is_differentiable", "operands_of", "outputs", "outputs_and_gradients"]


def outputs(operation: Operation | LatentAttention, arguments: Mapping[str, Any]) -> tuple[jax.Array, ...]:
    """What the call returns: its output, and the weights and the lse if requested."""
    result: Any = operation(**arguments)
    return tuple(x for x in (result.attention_outputs, result.attention_weights, result.lse) if x is not None)


def outputs_and_gradients(operation: Operation, arguments: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the sum of all outputs, its gradient for every floating array that has one)."""
    table = operands_of(operation, arguments)
    smooth = {name: x for name, x in arguments.items() if is_differentiable(name, x, table)}
    others = {name: x for name, x in arguments.items() if name not in smooth}

    def loss(smooth: dict[str, Any]) -> jax.Array:
        return sum((x.astype(jnp.float32).sum() for x in outputs(operation, smooth | others)), start=jnp.float32(0))

    return jax.value_and_grad(loss)(smooth)


def operands_of(operation: Operation, arguments: Mapping[str, Any]) -> OperandTable:
    """The operands of a call with these arguments: the operation's, and those of its score."""
    shapes = {name: x.shape for name, x in arguments.items() if hasattr(x, "shape")}
    return with_captures(operation.operands, arguments.get("score"), shapes)


def is_differentiable(name: str, x: Any, table: OperandTable) -> bool:
    """Whether an argument is an array that has a gradient, by the operation's table of operands."""
    if name not in table or not hasattr(x, "dtype"):
        return False
    return table[name].gradient and jnp.issubdtype(x.dtype, jnp.floating)
