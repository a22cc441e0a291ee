"""Pages of one sequence on several shards: page number p lies on shard p % n, an id g on shard g % n at g // n.

The host's ids count over all shards, 0 to pages - 1. Each shard's table has its own pages' local ids, and arrays of pages hold
the shards one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import InputError

__all__ = ["by_sequence_shard", "shard_ids", "split_table", "stored_ids", "table_problem", "whole_table"]


def split_table(table: np.ndarray, n: int, pages: int) -> np.ndarray:
    """[n, rows, width / n] of local ids, from a host table [rows, width] of ids below `pages`."""
    if n == 1:
        return table
    rows, width = table.shape
    by_shard = np.moveaxis(table.reshape(rows, width // n, n), -1, 0)
    return np.where(by_shard == pages, pages // n, by_shard // n).astype(np.int32)


def whole_table(table: Any, pages: int) -> Any:
    """The host's table [..., rows, width] from [..., n, rows, width / n]; `pages` counts those of all n. Invalid ids stay
    invalid in a known table, and become padding in a traced one."""
    is_static = isinstance(table, np.ndarray)
    numpy: Any = np if is_static else jnp
    n = table.shape[-3]
    ids = (table.astype(np.int64) if is_static else table) * n + np.arange(n, dtype=np.int32)[:, None, None]
    padding = table == pages // n
    if not is_static:  # ids out of range might overflow
        padding = (table < 0) | (table >= pages // n)
    ids = numpy.where(padding, np.int32(pages), ids)
    return numpy.moveaxis(ids, -3, -1).reshape(*table.shape[:-3], table.shape[-2], -1)


def stored_ids(ids: Any, n: int, pages: int) -> Any:
    """Where pages are in an array of `pages`; `pages` itself for an id out of range."""
    if n == 1:
        return ids
    numpy: Any = np if isinstance(ids, np.ndarray) else jnp
    return numpy.where((ids >= 0) & (ids < pages), ids % n * (pages // n) + ids // n, pages)


def shard_ids(ids: Any, n: int, shard: Any, pages: int) -> Any:
    """Local ids on one of n shards of `pages` each; `pages` itself for ids on other shards or out of range."""
    return jnp.where((ids >= 0) & (ids < n * pages) & (ids % n == shard), ids // n, pages)


def table_problem(table: np.ndarray, n: int, pages: int) -> str:
    """The first id of a host table that isn't on its page number's shard, naming the row; '' if there is none."""
    slots = np.arange(table.shape[1])
    wrong = (table >= 0) & (table < pages) & (table % n != slots % n)
    if not wrong.any():
        return ""
    row, slot = divmod(int(wrong.argmax()), table.shape[1])
    return (
        f"row {row}: page number {slot} has id {table[row, slot]}, which lies on sequence shard {table[row, slot] % n} of {n}; "
        f"wanted an id g with g % {n} == {slot % n}, as PagePool(..., sequence_shards={n}) gives."
    )


def by_sequence_shard(
    n: int, change: Callable[..., jax.Array], in_axes: tuple[int | None, ...]
) -> Callable[..., jax.Array]:
    """`change(pages, *others)` on each of n shards of an array of pages; `in_axes` says which others have one entry per shard.

    Uses vmap, not an index over all pages, so that an array split over devices stays split.
    """
    if n == 1:
        return change

    def of_all(pages: jax.Array, *others: Any) -> jax.Array:
        if pages.shape[0] % n:
            raise InputError(f"{pages.shape[0]} pages for {n} sequence shards; wanted a multiple.")
        split = pages.reshape(n, pages.shape[0] // n, *pages.shape[1:])
        return jax.vmap(change, in_axes=(0, *in_axes))(split, *others).reshape(pages.shape)

    return of_all
