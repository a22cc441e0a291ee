"""Whole pages or slots, in all layers of a group: copied before a shared one is written, and zeroed when they are freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from ...errors import InputError, InputTypeError
from ...masks.int_arrays import beyond_int32, is_integer, known_values
from ...sharding import on_auto_axes, spec_of
from .layer_arrays import LayerArrays, changed_rows
from .put import put
from .sequence_shards import by_sequence_shard, shard_ids
from .state import CacheState
from .token_slots import by_shard, rows_by_shard

__all__ = ["copy", "scrub"]


def copy(state: CacheState, pairs: Int32[Array, "*shards pairs 2"], *, group: int | None = None) -> CacheState:
    """Copy page `from` to page `to` for each (from, to), in every layer; all are read before one is written. In a group of states
    these are slots.

    `group`: if layers are in groups, the one whose pages these are.
    The number of pages is the id of padding. A pair with an id out of range is dropped, and so is one with pages on two sequence
    shards. Errors: InputError if values are known: ids out of range, a page that is written twice, two sequence shards.
    """
    if len(state.cache.groups) > 1:
        number = state.group_number(group)
        return state.with_group(number, copy(state.group(number), pairs))
    state.group_number(group)
    pairs = _ids(state, "pairs", pairs, (2,))
    values = known_values(pairs)
    if values is not None:
        _check_pairs(values, _pages_per_shard(state, _shards(pairs, 3)), state.sequence_shards, _word(state))

    def change(pages: jax.Array, page_pairs: jax.Array) -> jax.Array:
        count = pages.shape[0]
        source, target = page_pairs[:, 0], page_pairs[:, 1]
        right = (source >= 0) & (source < count) & (target >= 0)
        return put(pages, (jnp.where(right, target, count),), pages[jnp.where(right, source, 0)])

    return _every_shard(state, change, pairs, _shards(pairs, 3))


def scrub(state: CacheState, pages: Int32[Array, "*shards pages"], *, group: int | None = None) -> CacheState:
    """Zero pages and their scales, or slots, in every layer; `group` as in `copy`. The number of pages is the id of padding,
    which is dropped, as are ids out of range. Errors: InputError for ids out of range if they are known."""
    if len(state.cache.groups) > 1:
        number = state.group_number(group)
        return state.with_group(number, scrub(state.group(number), pages))
    state.group_number(group)
    ids = _ids(state, "pages", pages, ())

    def change(stored: jax.Array, page_ids: jax.Array) -> jax.Array:
        return put(stored, (jnp.where(page_ids < 0, stored.shape[0], page_ids),), jnp.zeros((), stored.dtype))

    return _every_shard(state, change, ids, _shards(ids, 2))


def _every_shard(state: CacheState, change: Callable[..., jax.Array], ids: Any, shards: int | None) -> CacheState:
    """`change(pages, ids)` on every array of pages and of scales per token, for each shard separately; host ids are converted
    to shard ids."""
    n = state.sequence_shards

    def on_one(pages: jax.Array, page_ids: jax.Array, shard: jax.Array) -> jax.Array:
        return change(pages, shard_ids(page_ids, n, shard, pages.shape[0]))

    def on_all(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
        return by_sequence_shard(n, on_one, (None, 0))(pages, page_ids, jnp.arange(n, dtype=jnp.int32))

    on_pages = change if n == 1 else on_all

    def run(layers: tuple[LayerArrays, ...], ids: jax.Array) -> tuple[LayerArrays, ...]:
        def changed(array: jax.Array) -> jax.Array:
            return by_shard(shards, on_pages, array, ids)

        return tuple(changed_rows(changed, layer) for layer in layers)

    layers = on_auto_axes(run, state.layers, jnp.asarray(ids), specs=lambda: jax.tree.map(spec_of, state.layers))
    return replace(state, layers=layers)


def _shards(ids: Any, rank: int) -> int | None:
    return ids.shape[0] if len(ids.shape) == rank else None


def _pages_per_shard(state: CacheState, shards: int | None) -> int:
    return rows_by_shard(shards, np.empty((state.pages, 0)), f"{_word(state)}s").shape[0 if shards is None else 1]


def _word(state: CacheState) -> str:
    return "page" if state.cache.has_pages else "slot"


def _ids(state: CacheState, name: str, value: Any, last: tuple[int, ...]) -> Any:
    """An array of page ids; known ones must be between 0 and the number of pages."""
    array = value if hasattr(value, "dtype") else np.asarray(value)
    if array.size == 0:
        array = np.zeros(array.shape if array.ndim > len(last) else (0, *last), np.int32)
    form = f"[{', '.join(['n', *map(str, last)])}], or [shards, {', '.join(['n', *map(str, last)])}]"
    if not is_integer(array.dtype):
        raise InputTypeError(f"{name} has dtype {array.dtype}; wanted ids, {form}.")
    rank = len(array.shape) - len(last)
    if rank not in (1, 2) or tuple(array.shape[rank:]) != last:
        raise InputError(f"{name} has shape {tuple(array.shape)}; wanted {form}.")
    if problem := beyond_int32(array, name):
        raise InputError(f"{problem}.")
    shards = array.shape[0] if rank == 2 else None
    count = _pages_per_shard(state, shards)
    values = known_values(array)
    if values is not None and ((values < 0) | (values > count)).any():
        wrong = np.argwhere((values < 0) | (values > count))[0]
        raise InputError(
            f"{name}[{', '.join(map(str, wrong))}] is {values[tuple(wrong)]}; wanted 0 to {count - 1}, or {count} for padding."
        )
    return array.astype(np.int32)


def _check_pairs(pairs: np.ndarray, count: int, n: int, word: str) -> None:
    """Errors: InputError for a page that is written twice, for padding copied to a page, and for two sequence shards."""
    for shard_pairs in pairs if pairs.ndim == 3 else pairs[None]:
        source, target = shard_pairs[shard_pairs[:, 1] < count].T
        pages, times = np.unique(target, return_counts=True)
        if (times > 1).any():
            raise InputError(f"pairs: {word} {pages[times > 1][0]} is written twice; wanted each {word} once.")
        if (source == count).any():
            raise InputError(f"pairs: {count}, the id of padding, is copied to {word} {target[source == count][0]}.")
        if (crossing := source % n != target % n).any():
            raise InputError(
                f"pairs: page {source[crossing][0]} is copied to page {target[crossing][0]}, which lies on another of {n} "
                f"sequence shards; wanted two ids that are equal modulo {n}."
            )
