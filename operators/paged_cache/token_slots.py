"""Where the tokens of a ragged batch go: a page and a row in it for each, or the id of padding for tokens that go nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from ...errors import InputError

__all__ = ["by_shard", "rows_by_shard", "token_slots"]


def token_slots(
    cu_q_lens: Int32[Array, rows + 1],
    kv_lens: Int32[Array, " rows"],
    page_table: Int32[Array, "rows width"],
    num_seqs: Int32[Array, ""],
    tokens: int,
    pages: int,
    page_size: int,
    stride: int = 1,
    shard: Any = 0,
    singles: bool = True,
) -> tuple[Int32[Array, " tokens"], Int32[Array, " tokens"]]:
    """(page id, row in the page) of each token: position kv_len - q_len + i of its sequence.

    A token after the last sequence, at a position without a page in the table, or with an id out of range gets the id
    `pages`, which a scatter with mode='drop' skips. Nothing is clamped. With a stride the table is one shard's: every
    stride-th page of a sequence from page number `shard` on; tokens on other pages get the id `pages` too. Without
    `singles`, so do tokens that are their row's only one.
    """
    rows, width = page_table.shape
    none = jnp.iinfo(jnp.int32).max
    starts = jnp.where(jnp.arange(rows + 1, dtype=jnp.int32) <= num_seqs, cu_q_lens, none)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = (starts[:, None] <= token[None]).sum(
        0, dtype=jnp.int32
    ) - 1  # the last row that starts at or before the token
    inside = (row >= 0) & (row < jnp.minimum(num_seqs, rows))
    row = jnp.where(inside, row, 0)
    first, last = cu_q_lens[row], cu_q_lens[row + 1]
    position = kv_lens[row] - (last - first) + (token - first)
    slot = position // page_size
    if stride > 1:
        inside &= slot % stride == shard
        slot = slot // stride
    inside &= (first <= token) & (token < last) & (position >= 0) & (slot < width)
    if not singles:
        inside &= last - first > 1
    page = page_table[row, jnp.where(inside, slot, 0)]
    inside &= (page >= 0) & (page < pages)
    return jnp.where(inside, page, pages), position % page_size


def by_shard(shards: int | None, change: Callable[..., jax.Array], pages: jax.Array, *others: Any) -> jax.Array:
    """`change(pages, *others)`, for each shard separately if there are several: `others` then have a leading dimension."""
    if shards is None:
        return change(pages, *others)
    split = jax.vmap(change)(rows_by_shard(shards, pages, "pages"), *others)
    return split.reshape(pages.shape)


def rows_by_shard(shards: int | None, array: Any, what: str) -> Any:
    """[shards, rows of a shard, ...] from [rows, ...]. Errors: InputError for rows that don't divide."""
    if shards is None:
        return array
    if array.shape[0] % shards:
        raise InputError(
            f"{what}: {array.shape[0]} for a batch of {shards} shards; wanted a multiple of {shards}, for equal shards."
        )
    reshaped = np.reshape if isinstance(array, np.ndarray) else jnp.reshape
    return reshaped(array, (shards, array.shape[0] // shards, *array.shape[1:]))
