"""Copies a sequence's state out of its slot, and into another: the part of extract and restore for layers with states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ...errors import InputError, InputTypeError, is_whole, shown
from ...masks.int_arrays import known_values
from ...sharding import on_auto_axes, spec_of
from .layer_arrays import LayerArrays, changed_rows
from .put import put
from .state import CacheState
from .state_batch import StateBatch

__all__ = ["extract_states", "restore_states", "row_index"]


def row_index(sizes: tuple[int, ...], sequence: Any) -> tuple[int, ...]:
    """The place of a row in a batch with kv_lens of these sizes: (row,), or (shard, row). Errors: InputTypeError, InputError."""
    index = sequence if isinstance(sequence, tuple) else (sequence,)
    if not all(is_whole(part, numpy=True) for part in index):
        raise InputTypeError(f"sequence={shown(sequence)}; wanted an int known while tracing, or (shard, row).")
    if len(index) != len(sizes) or not all(0 <= part < size for part, size in zip(index, sizes, strict=True)):
        form = (
            f"0 to {sizes[-1] - 1}"
            if len(sizes) == 1
            else f"(0 to {sizes[0] - 1}, 0 to {sizes[-1] - 1}), a shard and a row"
        )
        raise InputError(f"sequence={shown(sequence)}; wanted {form}.")
    return tuple(int(part) for part in index)


def extract_states(state: CacheState, batch: StateBatch, sequence: Any) -> tuple[tuple[LayerArrays, ...], Any]:
    """(the states after all tokens of a batch's row, [1, *shape] each; how many tokens). Zeros for a sequence without tokens."""
    batch.check_form()
    index, first, slots = _place(state, batch, sequence)
    tokens, lengths = _row(batch, index)
    slot = _at(batch.write_slots, (*index, 0), batch.read_slots, index, tokens)
    values = [known_values(x) for x in (slot, lengths)]
    if values[0] is not None and values[1] is not None and int(values[1]) and not 0 <= int(values[0]) < slots:
        raise InputError(
            f"sequence {sequence}: its state of {int(values[1])} tokens is in slot {int(values[0])}; wanted 0 to {slots - 1}."
        )

    def run(layers: tuple[LayerArrays, ...], slot: jax.Array, length: jax.Array) -> tuple[LayerArrays, ...]:
        right = (slot >= 0) & (slot < slots) & (length > 0)

        def take(array: jax.Array) -> jax.Array:
            row = array[jnp.where(right, slot + first, 0)[None]]
            return jnp.where(right, row, jnp.zeros((), array.dtype))

        return tuple(changed_rows(take, layer) for layer in layers)

    arrays = (jnp.asarray(slot, jnp.int32), jnp.asarray(lengths, jnp.int32))
    specs = lambda: jax.tree.map(lambda x: PartitionSpec(None, *spec_of(x)[1:]), state.layers)  # noqa: E731
    return on_auto_axes(run, state.layers, *arrays, specs=specs), arrays[1]


def restore_states(
    state: CacheState, saved: tuple[LayerArrays, ...], saved_length: Any, batch: StateBatch, sequence: Any
) -> CacheState:
    """The state with saved ones in the slot that a batch's row reads."""
    batch.check_form()
    index, first, slots = _place(state, batch, sequence)
    tokens, length = _row(batch, index)
    slot = batch.read_slots[index]
    known = [known_values(x) for x in (slot, tokens, length, saved_length)]
    if not any(x is None for x in known):
        at, new, many, kept = (int(x) for x in known if x is not None)
        if many - new != kept:
            raise InputError(
                f"sequence {sequence}: the row has {many - new} tokens before this step, but {kept} were saved; wanted as many: "
                "the state is that of these tokens."
            )
        if kept and not 0 <= at < slots:
            raise InputError(f"sequence {sequence}: the row reads slot {at}; wanted 0 to {slots - 1}.")
        _check_alone(batch, index, at, slots, sequence)

    def run(layers: tuple[LayerArrays, ...], saved: tuple[LayerArrays, ...], slot: jax.Array, length: jax.Array) -> Any:
        right = (slot >= 0) & (slot < slots) & (length > 0)

        def bring(array: jax.Array, row: jax.Array) -> jax.Array:
            return put(array, (jnp.where(right, slot + first, array.shape[0])[None],), row)

        return tuple(changed_rows(bring, layer, one) for layer, one in zip(layers, saved, strict=True))

    arrays = jax.tree.map(jnp.asarray, (saved, slot, saved_length))
    specs = lambda: jax.tree.map(spec_of, state.layers)  # noqa: E731
    return replace(state, layers=on_auto_axes(run, state.layers, *arrays, specs=specs))


def _place(state: CacheState, batch: StateBatch, sequence: Any) -> tuple[tuple[int, ...], int, int]:
    """(the row's place in the batch, the first slot of its shard, the slots of a shard)."""
    sizes = tuple(batch.kv_lens.shape)
    index = row_index(sizes, sequence)
    shards = sizes[0] if len(sizes) == 2 else 1
    if state.pages % shards:
        raise InputError(f"slots: {state.pages} for a batch of {shards} shards; wanted a multiple of {shards}.")
    slots = state.pages // shards
    return index, index[0] * slots if len(sizes) == 2 else 0, slots


def _row(batch: StateBatch, index: tuple[int, ...]) -> tuple[Any, Any]:
    """(the tokens of the step, those of the sequence) of a row."""
    last = (*index[:-1], index[-1] + 1)
    return batch.cu_q_lens[last] - batch.cu_q_lens[index], batch.kv_lens[index]


def _at(written: Any, first: tuple[int, ...], read: Any, index: tuple[int, ...], tokens: Any) -> Any:
    """The slot with the state after the row's tokens: that which the step writes, or reads if the row has no tokens in it."""
    numpy: Any = np if all(known_values(x) is not None for x in (written, read, tokens)) else jnp
    return numpy.where(tokens > 0, written[first], read[index])


def _check_alone(batch: StateBatch, index: tuple[int, ...], slot: int, slots: int, sequence: Any) -> None:
    """Errors: InputError for a slot that another row in use, which has a past, reads, or that it writes."""
    *shard, row = index
    known: Any = {name: known_values(x) for name, x in batch.arrays.items()}
    if any(x is None for x in known.values()) or not 0 <= slot < slots:
        return
    starts, lens, count, read, written = (x[tuple(shard)] for x in known.values())
    past = lens > np.diff(starts)
    taken = (past & (read == slot)) | (written == slot).any(1)
    others = [int(other) for other in np.flatnonzero(taken[: int(count)]) if other != row]
    if others:
        raise InputError(f"sequence {sequence}: slot {slot} is row {others[0]}'s too; give the row a slot of its own.")
