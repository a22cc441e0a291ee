"""dense_insert: writes tokens into a dense cache [batch, length, heads, dim] from a given position in each row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Num

from ...errors import InputError, InputTypeError
from ...masks.int_arrays import beyond_int32, is_integer, known_values
from ...sharding import on_auto_axes, spec_of
from .put import put

__all__ = ["dense_insert"]


def dense_insert(
    cache_key: Num[Array, "batch length kv_heads head_dim"],
    cache_value: Num[Array, "batch length kv_heads value_dim"],
    key: Num[Array, "batch q_len kv_heads head_dim"],
    value: Num[Array, "batch q_len kv_heads value_dim"],
    start: Int[Array, " batch"] | int,
) -> tuple[jax.Array, jax.Array]:
    """Return (cache_key, cache_value) with row b's tokens at start[b], start[b] + 1 and so on; one start serves all rows.

    Errors: InputTypeError for a dtype other than the cache's, InputError for shapes, and for tokens outside the cache if starts
    are known. If they aren't, such tokens are dropped, never clamped.
    """
    for name, cache, tokens in (("key", cache_key, key), ("value", cache_value, value)):
        if cache.dtype != tokens.dtype:
            raise InputTypeError(f"{name} is {tokens.dtype}, but its cache is {cache.dtype}; convert one of them.")
        rows, length, *rest = cache.shape if len(cache.shape) == 4 else (0, 0)
        if len(cache.shape) != 4 or len(tokens.shape) != 4 or (tokens.shape[0], *tokens.shape[2:]) != (rows, *rest):
            raise InputError(
                f"{name} has shape {tuple(tokens.shape)}, its cache {tuple(cache.shape)}; wanted [batch, q_len, heads, dim] "
                "and [batch, length, heads, dim]."
            )
    if cache_key.shape[:2] != cache_value.shape[:2] or key.shape[1] != value.shape[1]:
        raise InputError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} go into caches {tuple(cache_key.shape)} and "
            f"{tuple(cache_value.shape)}; wanted the same number of rows and of tokens in both."
        )
    batch, length = cache_key.shape[:2]
    starts = _starts(start, batch, length, key.shape[1])

    def write(caches: tuple[jax.Array, jax.Array], tokens: tuple[jax.Array, jax.Array], starts: jax.Array) -> Any:
        place = starts[:, None] + jnp.arange(tokens[0].shape[1], dtype=jnp.int32)[None]
        place = jnp.where(place < 0, length, place)
        # Uses vmap, not two index arrays, so that a batch split over devices stays split.
        put_rows = jax.vmap(lambda cache_row, at, rows: put(cache_row, (at,), rows))
        return tuple(put_rows(cache, place, rows) for cache, rows in zip(caches, tokens, strict=True))

    caches = jnp.asarray(cache_key), jnp.asarray(cache_value)
    arrays = (jnp.asarray(key), jnp.asarray(value)), starts
    updated: tuple[jax.Array, jax.Array] = on_auto_axes(
        write, caches, *arrays, specs=lambda: tuple(map(spec_of, caches))
    )
    return updated


def _starts(start: Any, batch: int, length: int, q_len: int) -> jax.Array:
    """int32 [batch]."""
    array = start if hasattr(start, "dtype") else np.asarray(start)
    if not is_integer(array.dtype):
        raise InputTypeError(f"start has dtype {array.dtype}; wanted whole numbers, [batch].")
    if tuple(array.shape) not in ((), (batch,)):
        raise InputError(f"start has shape {tuple(array.shape)}; wanted [{batch}], one per row, or one number.")
    values = known_values(array)
    if values is not None:
        wrong = np.atleast_1d((values < 0) | (values > length - q_len))
        if wrong.any():
            row = int(wrong.argmax())
            raise InputError(
                f"row {row}: {q_len} tokens from {np.atleast_1d(values)[row]} on in a cache of {length}; wanted a start from 0 "
                f"to {length - q_len}."
            )
    elif problem := beyond_int32(array, "start"):
        raise InputError(f"{problem}.")
    # With a very large traced start, start + i would overflow and write elsewhere.
    starts = jnp.asarray(array).astype(jnp.int32)
    return jnp.broadcast_to(jnp.where(starts > length, length, starts), (batch,))
