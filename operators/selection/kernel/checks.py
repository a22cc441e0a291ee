"""Shapes and dtypes of what several kernels take: a main attention's arrays, and selected positions."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ....errors import InputError, InputTypeError, shown

__all__ = ["check_attention", "check_lengths", "check_positions"]


def check_attention(
    query: Float[Array, "batch q_len heads dim"],
    key: Float[Array, "batch kv_len kv_heads dim"],
    **others: Array | None,
) -> None:
    """Errors: InputError for a key that doesn't fit the query, InputTypeError for one of these or `others` that isn't float."""
    for name, x in ({"query": query, "key": key} | others).items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputTypeError(f"{name} is {x.dtype}; wanted a float dtype.")
    if query.ndim != 4 or key.ndim != 4:
        wanted = "query [batch, q_len, heads, dim] and key [batch, kv_len, kv_heads, dim]"
        raise InputError(f"query has shape {query.shape} and key {key.shape}; wanted {wanted}.")
    batch, _, heads, dim = query.shape
    if key.shape[0] != batch or key.shape[3] != dim or key.shape[2] == 0 or heads % key.shape[2]:
        hint = "the number of heads is a multiple of that of kv heads"
        raise InputError(f"key has shape {key.shape}; wanted [{batch}, kv_len, kv_heads, {dim}]: {hint}.")


def check_positions(positions: Int[Array, "batch q_len k"], batch: int, q_len: int) -> None:
    """Errors: InputError for what isn't selected positions of these queries."""
    if positions.ndim != 3 or positions.shape[:2] != (batch, q_len) or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise InputError(f"positions is {shown(positions)}; wanted integers [{batch}, {q_len}, k].")


def check_lengths(
    query: Float[Array, "batch q_len heads dim"],
    key: Float[Array, "batch kv_len kv_heads dim"],
    index_query: Float[Array, "batch q_len index_heads index_dim"],
    index_key: Float[Array, "batch kv_len index_dim"],
    lse: Float[Array, "batch heads q_len"] | None,
) -> None:
    """Errors: InputError for a main attention with other lengths than its indexer, or an lse that isn't its own."""
    batch, q_len, heads, _ = query.shape
    if (batch, q_len) != index_query.shape[:2] or key.shape[1] != index_key.shape[1]:
        lengths = f"[{index_query.shape[0]}, {index_query.shape[1]}, ..] and [.., {index_key.shape[1]}, ..]"
        raise InputError(f"query has shape {query.shape} and key {key.shape}; wanted {lengths}, as the indexer's.")
    if lse is not None and lse.shape != (batch, heads, q_len):
        raise InputError(f"lse has shape {lse.shape}; wanted {[batch, heads, q_len]}.")
