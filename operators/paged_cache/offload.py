"""Copies a sequence's keys and values out of its pages, to be stored elsewhere, and back into pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from ...errors import InputError, InputTypeError, is_whole, shown
from ...masks.int_arrays import known_values
from ...planning.cache.window_pages import first_visible_page
from ...pytree_export import exported
from ...sharding import on_auto_axes, spec_of
from .batch import RaggedBatch
from .insert import check_shards
from .put import put
from .sequence_shards import stored_ids, whole_table
from .state import CacheState, LayerPages
from .token_slots import rows_by_shard

__all__ = ["SavedSequence", "extract", "restore"]


_Batches = RaggedBatch | Sequence[RaggedBatch]


@exported()
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SavedSequence:
    """A sequence's pages in its own order; each layer has the cache's layout, with zeros after its last token and in place
    of pages outside the window. Per-cache scales are unchanged. A pytree: jax.device_get moves
    it to the host."""

    layers: tuple[LayerPages, ...]
    length: Int32[Array, ""]


def extract(state: CacheState, batch: _Batches, sequence: int | tuple[int, int]) -> SavedSequence:
    """A copy of a batch row's pages; `sequence` is the row, or (shard, row) if batches have shards. If
    layers are in groups, `batch` is a list with the batch of each.

    If the batch's values are known the copy has only the pages that hold the row's tokens, else as many as a row of the table.
    Errors: InputError for a row that doesn't exist, and for pages out of range if they are known.
    """
    if len(state.cache.groups) > 1:
        parts = [extract(group_state, group_batch, sequence) for group_state, group_batch in _by_group(state, batch)]
        restored = state
        for group, part in enumerate(parts):
            restored = restored.with_group(group, replace(state.group(group), layers=part.layers))
        return SavedSequence(restored.layers, parts[0].length)
    batch = _single_batch(batch)
    table, length, first, count = _row(state, batch, sequence)
    size = state.cache.page_size
    table_values, known_length = known_values(table), known_values(length)
    if table_values is not None and known_length is not None:
        table = _needed(table_values, int(known_length), state, count, sequence)
    by_head = state.cache.heads_at == 1

    def run(stored: tuple[LayerPages, ...], table: jax.Array, length: jax.Array) -> tuple[LayerPages, ...]:
        ids = stored_ids(table, state.sequence_shards, count)
        inside = (ids >= 0) & (ids < count)
        written = inside[:, None] & (jnp.arange(ids.shape[0] * size, dtype=jnp.int32).reshape(-1, size) < length)

        def take(array: jax.Array | None) -> jax.Array | None:
            if array is None or array.ndim < 3:
                return array
            gathered = array[jnp.where(inside, ids + first, 0)]
            mask = written[:, None] if by_head else written
            mask = mask.reshape(*mask.shape, *(1,) * (array.ndim - mask.ndim))
            return jnp.where(mask, gathered, jnp.zeros((), array.dtype))

        return tuple(LayerPages(*map(take, pages)) for pages in stored)  # type: ignore[arg-type]

    def spec(array: jax.Array) -> PartitionSpec:
        """A page isn't split, only what it holds."""
        array_spec = spec_of(array)
        return PartitionSpec(None, *array_spec[1:]) if array.ndim >= 3 else array_spec

    length = jnp.asarray(length, jnp.int32)
    specs = lambda: jax.tree.map(spec, state.layers)  # noqa: E731
    return SavedSequence(on_auto_axes(run, state.layers, jnp.asarray(table), length, specs=specs), length)


def restore(state: CacheState, saved: SavedSequence, batch: _Batches, sequence: int | tuple[int, int]) -> CacheState:
    """Return the state with a saved sequence in a batch row's pages, which may differ from the old ones. If layers
    are in groups, `batch` is a list with the batch of each.

    The row may have more tokens than were saved: those that the batch appends. Pages out of range are dropped. Errors: InputError
    for a sequence of another cache and, if values are known, for too few pages and for a page that another row uses too.
    """
    if len(state.cache.groups) > 1:
        _check_same(state, saved)
        for group, (group_state, group_batch) in enumerate(_by_group(state, batch)):
            layers = tuple(saved.layers[place] for place in state.cache.places(group))
            state = state.with_group(group, restore(group_state, replace(saved, layers=layers), group_batch, sequence))
        return state
    batch = _single_batch(batch)
    table, length, first, count = _row(state, batch, sequence)
    size, total = state.cache.page_size, state.pages
    _check_same(state, saved)
    table_values, saved_length = known_values(table), known_values(saved.length)
    if table_values is not None and saved_length is not None:
        needed = _needed(table_values, int(saved_length), state, count, sequence)
        _check_alone(_tables(batch, count), batch.kv_lens, needed[needed < count], sequence, size)
        known_length = known_values(length)
        if known_length is not None and int(known_length) < int(saved_length):
            raise InputError(
                f"sequence {sequence}: kv_len is {int(known_length)}, but {int(saved_length)} tokens were saved."
            )
    slots = min(saved.layers[0].key.shape[0], table.shape[0])

    def run(stored: tuple[LayerPages, ...], saved_pages: tuple[LayerPages, ...], table: Any, length: Any) -> Any:
        ids = stored_ids(table[:slots], state.sequence_shards, count)
        used = (ids >= 0) & (ids < count) & (jnp.arange(slots, dtype=jnp.int32) * size < length)
        where = jnp.where(used, ids + first, total)

        def bring(array: jax.Array | None, saved_array: jax.Array | None) -> jax.Array | None:
            if array is None or saved_array is None or array.ndim < 3:
                return array
            return put(array, (where,), saved_array[:slots])

        layers = zip(stored, saved_pages, strict=True)
        return tuple(LayerPages(*map(bring, pages, saved_layer)) for pages, saved_layer in layers)  # type: ignore[arg-type]

    arrays = jax.tree.map(jnp.asarray, (saved.layers, table, saved.length))
    specs = lambda: jax.tree.map(spec_of, state.layers)  # noqa: E731
    return replace(state, layers=on_auto_axes(run, state.layers, *arrays, specs=specs))


def _row(state: CacheState, batch: RaggedBatch, sequence: Any) -> tuple[Any, Any, int, int]:
    """(page ids as the host counts them, kv_len, the first page of its shard, the pages of a shard) of a batch's row."""
    batch.check_form()
    check_shards(state, batch)
    shards = batch.shards
    index = sequence if isinstance(sequence, tuple) else (sequence,)
    sizes = batch.kv_lens.shape
    if not all(is_whole(part, numpy=True) for part in index):
        raise InputTypeError(f"sequence={shown(sequence)}; wanted an int known while tracing, or (shard, row).")
    if len(index) != len(sizes) or not all(0 <= part < size for part, size in zip(index, sizes, strict=True)):
        form = (
            f"0 to {sizes[-1] - 1}"
            if shards is None
            else f"(0 to {sizes[0] - 1}, 0 to {sizes[-1] - 1}), a shard and a row"
        )
        raise InputError(f"sequence={shown(sequence)}; wanted {form}.")
    count = rows_by_shard(shards, state.layers[0].key, "pages").shape[0 if shards is None else 1]

    def run(batch: RaggedBatch) -> tuple[Any, Any]:
        return _tables(batch, count)[index], batch.kv_lens[index]

    table, length = on_auto_axes(run, batch, specs=lambda: (PartitionSpec(), PartitionSpec()))
    return table, length, 0 if shards is None else int(index[0]) * count, count


def _tables(batch: RaggedBatch, pages: int) -> Any:
    return batch.page_table if batch.sequence_shards == 1 else whole_table(batch.page_table, pages)


def _needed(table: np.ndarray, length: int, state: CacheState, count: int, sequence: Any) -> np.ndarray:
    """The ids of the pages that hold so many tokens; ids of pages outside the window stay as they are. Errors: InputError for
    pages that the table lacks."""
    size = state.cache.page_size
    needed, first = -(-length // size), first_visible_page(length, state.cache.window_tokens, size)
    ids = table[:needed]
    page_ids = ids[first:]
    if length < 0 or len(ids) < needed or ((page_ids < 0) | (page_ids >= count)).any():
        raise InputError(
            f"sequence {sequence}: {length} tokens need {needed - first} pages with ids 0 to {count - 1}; the table gives "
            f"{shown(page_ids.tolist())}."
        )
    return ids


def _by_group(state: CacheState, batches: _Batches) -> list[tuple[CacheState, RaggedBatch]]:
    """Each group's layers with its batch. Errors: InputError unless there is one batch per group, in order."""
    count = len(state.cache.groups)
    group_batches = [] if isinstance(batches, RaggedBatch) else list(batches)
    if [group_batch.group for group_batch in group_batches] != list(range(count)):
        raise InputError(f"the cache's layers are in {count} groups; wanted a list with the batch of each, in order.")
    return [(state.group(number), group_batch) for number, group_batch in enumerate(group_batches)]


def _single_batch(batches: _Batches) -> RaggedBatch:
    """The batch of the only group."""
    if isinstance(batches, RaggedBatch):
        return batches
    if len(batches) != 1:
        raise InputError(f"{len(batches)} batches for a cache of one group of layers; wanted one.")
    return batches[0]


def _check_alone(table: Any, kv_lens: Any, ids: np.ndarray, sequence: Any, size: int) -> None:
    tables, lens = known_values(table), known_values(kv_lens)
    if tables is None or lens is None:
        return
    shard = sequence[:-1] if isinstance(sequence, tuple) else ()
    row = sequence[-1] if isinstance(sequence, tuple) else sequence
    for other, (table, length) in enumerate(zip(tables[shard], lens[shard], strict=True)):
        both = np.intersect1d(ids, table[: -(-int(length) // size)]) if other != row else ids[:0]
        if both.size:
            raise InputError(f"sequence {sequence}: page {both[0]} is row {other}'s too; give the row its own pages.")


def _check_same(state: CacheState, saved: SavedSequence) -> None:
    """Errors: InputError for layers, shapes, dtypes and fixed scales that differ from the cache's."""
    if len(saved.layers) != len(state.layers):
        raise InputError(f"{len(saved.layers)} layers were saved; the cache has {len(state.layers)}.")
    for layer, (pages, saved_pages) in enumerate(zip(state.layers, saved.layers, strict=True)):
        for name, stored, saved_array in zip(LayerPages._fields, pages, saved_pages, strict=True):
            forms = [
                None if x is None else (x.shape[1:] if x.ndim >= 3 else x.shape, str(x.dtype))
                for x in (stored, saved_array)
            ]
            if forms[0] != forms[1]:
                raise InputError(f"layer {layer}, {name}: saved {forms[1]}, but the cache has {forms[0]}.")
            if stored is None or stored.ndim >= 3:
                continue
            values = [known_values(x) for x in (stored, saved_array)]
            if values[0] is not None and values[1] is not None and not np.array_equal(values[0], values[1]):
                raise InputError(f"layer {layer}, {name}: saved with other scales than the cache has.")
