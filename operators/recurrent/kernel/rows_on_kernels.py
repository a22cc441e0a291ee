"""A recurrence over the rows of a ragged batch by kernels: `over_rows` without an array of the states of all rows.

First the rows with more tokens than are worked on alone, in chunks, one row after the other: each state is read from its slot. If
the last tokens have states that are kept, it goes on from there to a slot that the row writes, where its last tokens find it.
Then the last tokens of all rows, by a kernel that reads and writes the slots in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ...kernels.varying import alike
from .over_rows import Rows, Tokens, last_tokens_alone, started, written
from .tpu_sizes import turns

__all__ = ["Slots", "chunks_of_rows", "last_tokens_of_rows"]

Slots = tuple[jax.Array, ...]
"""Of states, and of the windows of convolutions."""
Run = Callable[[Tokens, Slots, jax.Array], tuple[jax.Array, Slots]]
Token = Callable[[Tokens, Slots, Rows], tuple[jax.Array, Slots]]


def chunks_of_rows(
    run: Run, arrays: Tokens, slots: Slots, rows: Rows, chunk_size: int
) -> tuple[jax.Array, Slots, Rows]:
    """(outputs [tokens, ...], 0 for those of no chunk; the slots; the rows with the tokens that are left).

    run: (arrays [1, n, ...], 0 from `count` on; what the slots hold before them [1, ...], states in float32; count) -> (outputs
    [1, n, ...], the same after them). arrays: [tokens, ...] each. slots: of states, and of windows of convolutions. A row that
    keeps no state, or only that after all tokens, has none left."""
    states, *windows = slots
    tokens, columns, none, turned = arrays[0].shape[0], rows.write.shape[1], len(states), turns(*states.shape[2:])

    def exchanged(x: jax.Array) -> jax.Array:
        """States as they lie, from states as they are, or the reverse."""
        return jnp.swapaxes(x, 2, 3) if turned else x

    def as_slots(x: jax.Array) -> jax.Array:
        """One state that lies as all slots do, which else would be copied to lie as it does."""
        return with_layout_constraint(x, Layout((0, 1, 2, 3))) if turned else x

    of_one = (states[:1].astype(jnp.float32), *(x[:1] for x in windows))
    one = jax.eval_shape(run, tuple(x[:1, None] for x in arrays), of_one, jnp.int32(1))[0]
    outputs = jnp.zeros((tokens, *one.shape[2:]), one.dtype)
    alone = last_tokens_alone(rows.longest, columns)
    long, kept = rows.lengths > alone, rows.write < none
    target = jnp.where(long, jnp.take_along_axis(rows.write, jnp.argmax(kept, 1)[:, None], 1)[:, 0], none)
    whole = (target == none) | (columns == 1)
    counts = jnp.where(long, jnp.where(whole, rows.lengths, rows.lengths - np.int32(alone)), 0)
    left = rows._replace(
        starts=rows.starts + counts,
        lengths=rows.lengths - counts,
        fresh=rows.fresh & ~long,
        read=jnp.where(long, target, rows.read),
    )
    most = tokens if rows.longest is None else min(tokens, rows.longest)
    size = min(chunk_size, 1 << max(most - 1, 0).bit_length())
    chunks = (counts + np.int32(size - 1)) // np.int32(size)
    ends = jnp.cumsum(chunks)
    # A chunk may begin less than its size before the end.
    arrays = tuple(jnp.pad(x, [(0, size), *[(0, 0)] * (x.ndim - 1)]) for x in arrays)
    outputs = jnp.pad(outputs, [(0, size), *[(0, 0)] * (outputs.ndim - 1)])
    places, state = jnp.arange(size, dtype=jnp.int32), jnp.zeros((1, *states.shape[1:]), jnp.float32)
    # Windows are small, so that those of all rows are at hand; XLA would move their slots to VMEM for the loop.
    before = tuple(started(x, rows) for x in windows)
    held = arrays, outputs, exchanged(states), state, before, counts, chunks, ends, target, rows._replace(longest=None)
    arrays, outputs, states, state, before, counts, chunks, ends, target, of_rows = alike(held)

    def chunk(n: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        outputs, states, state, windows = carry
        row = jnp.sum(ends <= n, dtype=jnp.int32)
        done = (n - ends[row] + chunks[row]) * np.int32(size)
        at, count, read, write = of_rows.starts[row] + done, counts[row] - done, of_rows.read[row], target[row]
        stored = exchanged(as_slots(lax.dynamic_slice_in_dim(states, read, 1))).astype(jnp.float32)
        stored = jnp.where(of_rows.fresh[row], 0, jnp.where(read < none, stored, np.float32(np.nan)))
        state = jnp.where(done == 0, stored, state)

        def only(x: jax.Array, other: jax.Array | int) -> jax.Array:
            return jnp.where((places < count).reshape(-1, *[1] * (x.ndim - 1)), x, other)

        here = tuple(only(lax.dynamic_slice_in_dim(x, at, size), 0)[None] for x in arrays)
        of_row = tuple(lax.dynamic_slice_in_dim(x, row, 1) for x in windows)
        found, (state, *after) = run(here, (state, *of_row), count)
        windows = tuple(lax.dynamic_update_slice_in_dim(x, one, row, 0) for x, one in zip(windows, after, strict=True))
        others = lax.dynamic_slice_in_dim(outputs, at, size)
        outputs = lax.dynamic_update_slice_in_dim(outputs, only(found[0], others), at, 0)
        # A row without a slot to write leaves one as it is.
        own = as_slots(exchanged(state.astype(states.dtype)))
        own = jnp.where(write < none, own, lax.dynamic_slice_in_dim(states, write, 1))
        return outputs, lax.dynamic_update_slice_in_dim(states, own, write, 0), state, windows

    carry = outputs, states, state, before
    outputs, states, _, before = lax.fori_loop(jnp.int32(0), ends[-1], chunk, carry)
    windows = [written(x, target, one) for x, one in zip(windows, before, strict=True)]
    return outputs[:tokens], (exchanged(states), *windows), left


def last_tokens_of_rows(
    token: Token, arrays: Tokens, slots: Slots, rows: Rows, outputs: jax.Array | None = None
) -> tuple[jax.Array, Slots]:
    """(outputs [tokens, ...], the slots) of rows that have no more tokens than are worked on alone.

    token: (arrays [rows, tokens of each, ...], slots, rows) -> (outputs [rows, tokens of each, ...], slots), of the last tokens
    of each row; arrays: [tokens, ...] each; outputs: those of other tokens, 0 if there are none."""
    tokens, columns, none = arrays[0].shape[0], rows.write.shape[1], len(slots[0])
    alone = last_tokens_alone(rows.longest, columns)
    write = jnp.pad(rows.write[:, :alone], ((0, 0), (0, max(alone - columns, 0))), constant_values=none)
    place = jnp.arange(alone, dtype=jnp.int32)[None] + (rows.lengths - np.int32(alone))[:, None]
    at = jnp.where(place >= 0, rows.starts[:, None] + place, tokens)
    here = tuple(jnp.take(x, at, axis=0, mode="fill", fill_value=0) for x in arrays)
    found, slots = token(here, slots, rows._replace(write=write))
    if outputs is None:
        outputs = jnp.zeros((tokens, *found.shape[2:]), found.dtype)
    at, found, outputs = alike((at, found, outputs))
    return outputs.at[at].set(found.astype(outputs.dtype), mode="drop"), slots
