"""Copies a sequence's keys, values and states out of its pages and slots, to be stored elsewhere, and back into others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from ...errors import InputError, InputTypeError, a_type, shown
from ...masks.int_arrays import known_values
from ...planning.cache.layer_groups import LayerGroup
from ...planning.cache.window_pages import first_visible_page
from ...pytree_export import exported
from ...sharding import on_auto_axes, spec_of
from .batch import RaggedBatch
from .insert import check_shards
from .layer_arrays import LayerArrays, LayerPages, changed_rows, row_count
from .put import put
from .saved_states import extract_states, restore_states, row_index
from .sequence_shards import stored_ids, whole_table
from .state import CacheState
from .state_batch import StateBatch

__all__ = ["SavedSequence", "extract", "restore"]


_Batches = RaggedBatch | StateBatch | Sequence[RaggedBatch | StateBatch]


@exported()
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SavedSequence:
    """A sequence's pages in its own order; each layer has the cache's layout, with zeros after its last token and in place
    of pages outside the window. Per-cache scales are unchanged. Of layers with states the one state after the last token,
    [1, *shape]. A pytree: jax.device_get moves it to the host."""

    layers: tuple[LayerArrays, ...]
    length: Int32[Array, ""]


def extract(state: CacheState, batch: _Batches, sequence: int | tuple[int, int]) -> SavedSequence:
    """A copy of a batch row's pages and states; `sequence` is the row, or (shard, row) if batches have shards. If
    layers are in groups, `batch` is a list with the batch of each, a StateBatch for one of states.

    If the batch's values are known the copy has only the pages that hold the row's tokens, else as many as a row of the table.
    Errors: InputError for a row that doesn't exist, and for pages out of range if they are known.
    """
    if len(state.cache.groups) > 1:
        parts = [extract(group_state, group_batch, sequence) for group_state, group_batch in _by_group(state, batch)]
        restored = state
        for group, part in enumerate(parts):
            restored = restored.with_group(group, replace(state.group(group), layers=part.layers))
        return SavedSequence(restored.layers, parts[0].length)
    own = _single_batch(state, batch)
    if state.cache.has_states:
        return SavedSequence(*extract_states(state, own, sequence))
    table, length, first, count = _row(state, own, sequence)
    size = state.cache.page_size
    table_values, known_length = known_values(table), known_values(length)
    if table_values is not None and known_length is not None:
        table = _needed(table_values, int(known_length), state, count, sequence)
    by_head = state.cache.heads_at == 1

    def run(stored: tuple[LayerArrays, ...], table: jax.Array, length: jax.Array) -> tuple[LayerArrays, ...]:
        ids = stored_ids(table, state.sequence_shards, count)
        inside = (ids >= 0) & (ids < count)
        written = inside[:, None] & (jnp.arange(ids.shape[0] * size, dtype=jnp.int32).reshape(-1, size) < length)

        def take(array: jax.Array) -> jax.Array:
            gathered = array[jnp.where(inside, ids + first, 0)]
            mask = written[:, None] if by_head else written
            mask = mask.reshape(*mask.shape, *(1,) * (array.ndim - mask.ndim))
            return jnp.where(mask, gathered, jnp.zeros((), array.dtype))

        return tuple(changed_rows(take, pages) for pages in stored)

    def spec(array: jax.Array) -> PartitionSpec:
        """A page isn't split, only what it holds."""
        array_spec = spec_of(array)
        return PartitionSpec(None, *array_spec[1:]) if array.ndim >= 3 else array_spec

    length = jnp.asarray(length, jnp.int32)
    specs = lambda: jax.tree.map(spec, state.layers)  # noqa: E731
    return SavedSequence(on_auto_axes(run, state.layers, jnp.asarray(table), length, specs=specs), length)


def restore(state: CacheState, saved: SavedSequence, batch: _Batches, sequence: int | tuple[int, int]) -> CacheState:
    """Return the state with a saved sequence in a batch row's pages and in the slot that it reads, which may differ from the old
    ones. If layers are in groups, `batch` is a list with the batch of each, a StateBatch for one of states.

    The row may have more tokens than were saved: those that the batch appends. Pages out of range are dropped. Errors: InputError
    for a sequence of another cache and, if values are known, for too few pages and for a page that another row uses too.
    """
    if len(state.cache.groups) > 1:
        _check_same(state, saved)
        for group, (group_state, group_batch) in enumerate(_by_group(state, batch)):
            layers = tuple(saved.layers[place] for place in state.cache.places(group))
            state = state.with_group(group, restore(group_state, replace(saved, layers=layers), group_batch, sequence))
        return state
    own = _single_batch(state, batch)
    _check_same(state, saved)
    if state.cache.has_states:
        return restore_states(state, saved.layers, saved.length, own, sequence)
    table, length, first, count = _row(state, own, sequence)
    size, total = state.cache.page_size, state.pages
    table_values, saved_length = known_values(table), known_values(saved.length)
    if table_values is not None and saved_length is not None:
        needed = _needed(table_values, int(saved_length), state, count, sequence)
        _check_alone(_tables(own, count), own.kv_lens, needed[needed < count], sequence, size)
        known_length = known_values(length)
        if known_length is not None and int(known_length) < int(saved_length):
            raise InputError(
                f"sequence {sequence}: kv_len is {int(known_length)}, but {int(saved_length)} tokens were saved."
            )
    slots = min(row_count(saved.layers[0]), table.shape[0])

    def run(stored: tuple[LayerArrays, ...], saved_pages: tuple[LayerArrays, ...], table: Any, length: Any) -> Any:
        ids = stored_ids(table[:slots], state.sequence_shards, count)
        used = (ids >= 0) & (ids < count) & (jnp.arange(slots, dtype=jnp.int32) * size < length)
        where = jnp.where(used, ids + first, total)

        def bring(array: jax.Array, saved_array: jax.Array) -> jax.Array:
            return put(array, (where,), saved_array[:slots])

        layers = zip(stored, saved_pages, strict=True)
        return tuple(changed_rows(bring, pages, saved_layer) for pages, saved_layer in layers)

    arrays = jax.tree.map(jnp.asarray, (saved.layers, table, saved.length))
    specs = lambda: jax.tree.map(spec_of, state.layers)  # noqa: E731
    return replace(state, layers=on_auto_axes(run, state.layers, *arrays, specs=specs))


def _row(state: CacheState, batch: RaggedBatch, sequence: Any) -> tuple[Any, Any, int, int]:
    """(page ids as the host counts them, kv_len, the first page of its shard, the pages of a shard) of a batch's row."""
    batch.check_form()
    check_shards(state, batch)
    shards = batch.shards
    index = row_index(tuple(batch.kv_lens.shape), sequence)
    count = state.pages // (shards or 1)

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


def _by_group(state: CacheState, batches: _Batches) -> list[tuple[CacheState, Any]]:
    """Each group's layers with its batch. Errors: InputError unless there is one batch per group, in order."""
    groups = state.cache.groups
    listed = list(batches) if isinstance(batches, list | tuple) else []
    if len(listed) != len(groups) or not all(map(_fits, listed, groups, range(len(groups)))):
        states = ", a StateBatch for one of states" if state.cache.has_states else ""
        raise InputError(
            f"the cache's layers are in {len(groups)} groups; wanted a list with the batch of each, in order{states}."
        )
    return [(state.group(number), batch) for number, batch in enumerate(listed)]


def _fits(batch: Any, group: LayerGroup, number: int) -> bool:
    """Whether a batch is one for this group of layers."""
    return (
        isinstance(batch, StateBatch) if group.of_states else isinstance(batch, RaggedBatch) and batch.group == number
    )


def _single_batch(state: CacheState, batches: _Batches) -> Any:
    """The batch of the only group."""
    listed = list(batches) if isinstance(batches, list | tuple) else [batches]
    if len(listed) != 1:
        raise InputError(f"{len(listed)} batches for a cache of one group of layers; wanted one.")
    if not _fits(listed[0], state.cache.groups[0], listed[0].group if isinstance(listed[0], RaggedBatch) else 0):
        wanted = "StateBatch" if state.cache.has_states else "RaggedBatch"
        raise InputTypeError(f"batch is {a_type(listed[0])}; wanted a {wanted}.")
    return listed[0]


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
    for layer, (arrays, saved_arrays) in enumerate(zip(state.layers, saved.layers, strict=True)):
        own, others = (_named(x) for x in (arrays, saved_arrays))
        if type(arrays) is not type(saved_arrays) or own.keys() != others.keys():
            raise InputError(f"layer {layer}: saved {', '.join(others)}, but the cache has {', '.join(own)}.")
        least = 3 if isinstance(arrays, LayerPages) else 1
        for name, stored in own.items():
            forms = [
                None if x is None else (x.shape[1:] if x.ndim >= least else x.shape, str(x.dtype))
                for x in (stored, others[name])
            ]
            if forms[0] != forms[1]:
                raise InputError(f"layer {layer}, {name}: saved {forms[1]}, but the cache has {forms[0]}.")
            if stored is None or stored.ndim >= least:
                continue
            values = [known_values(x) for x in (stored, others[name])]
            if values[0] is not None and values[1] is not None and not np.array_equal(values[0], values[1]):
                raise InputError(f"layer {layer}, {name}: saved with other scales than the cache has.")


def _named(layer: LayerArrays) -> dict[str, Any]:
    return layer._asdict() if isinstance(layer, LayerPages) else dict(layer.arrays)
