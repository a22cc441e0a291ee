"""A recurrence over the rows of a ragged batch, whose states lie in slots: the tokens of each row continue its own state.

All but the last tokens of a row are worked on in chunks, one row after the other, so that memory is linear in the tokens. The
last tokens of all rows are worked on together, a token at a time: one, or as many as have a state that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...kernels.varying import alike

__all__ = ["FEW", "Rows", "last_tokens_alone", "over_rows", "started", "written"]

FEW = 8
"""Rows of at most so many tokens are worked on a token at a time."""

Tokens = tuple[jax.Array, ...]
Run = Callable[[Tokens, jax.Array], tuple[jax.Array, jax.Array]]


class Rows(NamedTuple):
    """The rows of a step on one device. int32 [rows]: starts and lengths of each row's tokens; fresh, bool: whether it starts
    from zeros; read: the slot of the state before its first token. write int32 [rows, columns]: column j is the slot of the state
    without its last j tokens, the number of slots for none. longest: the most tokens of a row, None if unknown."""

    starts: jax.Array
    lengths: jax.Array
    fresh: jax.Array
    read: jax.Array
    write: jax.Array
    longest: int | None

    @classmethod
    def of(cls, batch: dict[str, jax.Array], tokens: int, slots: int, longest: int | None) -> Rows:
        """From the arrays of a StateBatch, whose shards' tokens and slots follow one another: `tokens` and `slots` of all."""
        names = ("cu_q_lens", "kv_lens", "read_slots", "write_slots")
        shards = batch["num_seqs"].shape[0] if batch["num_seqs"].ndim else 1
        bounds, lens, read, write = (batch[n].reshape(shards, *batch[n].shape[batch["num_seqs"].ndim :]) for n in names)
        shard = jnp.arange(shards, dtype=jnp.int32)[:, None]
        own_tokens, own_slots = tokens // shards, slots // shards
        used = jnp.arange(lens.shape[1], dtype=jnp.int32)[None] < batch["num_seqs"].reshape(shards, 1)
        lengths = jnp.where(used, bounds[:, 1:] - bounds[:, :-1], 0)
        columns = jnp.arange(write.shape[2], dtype=jnp.int32)
        kept = (columns[None, None] < lengths[..., None]) & (write >= 0) & (write < own_slots)
        known = (read >= 0) & (read < own_slots)
        return cls(
            (bounds[:, :-1] + shard * np.int32(own_tokens)).reshape(-1),
            lengths.reshape(-1),
            (lens <= lengths).reshape(-1),
            jnp.where(known, read + shard * np.int32(own_slots), slots).reshape(-1),
            jnp.where(kept, write + shard[..., None] * np.int32(own_slots), slots).reshape(-1, write.shape[2]),
            longest,
        )

    def counted(self, tokens: int) -> jax.Array:
        """bool [tokens]: whether a token is of a row."""
        bounds = jnp.zeros((tokens + 1,), jnp.int32)
        live = (self.lengths > 0).astype(jnp.int32)
        bounds = bounds.at[self.starts].add(live, mode="drop").at[self.starts + self.lengths].add(-live, mode="drop")
        return jnp.cumsum(bounds)[:tokens] > 0

    def row_of(self, tokens: int) -> jax.Array:
        """int32 [tokens]: a number for the row of each token, 0 for those before the first; not for tokens of none."""
        first = jnp.where(self.lengths > 0, self.starts, tokens)
        return jnp.cumsum(jnp.zeros((tokens,), jnp.int32).at[first].add(1, mode="drop"))


def last_tokens_alone(longest: int | None, columns: int) -> int:
    """How many of the last tokens of each row are worked on a token at a time. longest: the most tokens of a row, None if
    unknown; columns: of slots to write."""
    return longest if longest is not None and longest <= max(FEW, columns) else columns


def started(slots: jax.Array, rows: Rows) -> jax.Array:
    """The state before the first token of each row [rows, ...]. That of a slot which doesn't exist is NaN."""
    read = jnp.take(slots, rows.read, axis=0, mode="fill", fill_value=np.nan)
    # Once: what reads it would else gather again.
    return lax.optimization_barrier(jnp.where(rows.fresh.reshape(-1, *[1] * (slots.ndim - 1)), 0, read))


def written(slots: jax.Array, at: jax.Array, states: jax.Array) -> jax.Array:
    """The slots with states [rows, ...] written at `at`, of which those that exist differ."""
    none = slots.shape[0] + jnp.arange(at.shape[0], dtype=jnp.int32)
    at = jnp.where(at < slots.shape[0], at, none)
    return slots.at[at].set(states.astype(slots.dtype), mode="drop", unique_indices=True)


def over_rows(
    run: Run,
    arrays: Tokens,
    slots: jax.Array,
    rows: Rows,
    chunk_size: int,
    *,
    one_by_one: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """(outputs [tokens, ...], 0 for tokens of no row; the slots after it).

    run: (arrays [batch, n, ...], states [batch, ...] in float32) -> (outputs [batch, n, ...], states); tokens of zeros change no
    state. arrays: [tokens, ...] each; slots [slots, ...]. one_by_one: rows of one token are worked on one after the other, each
    state where it is, in so many blocks of heads, which all arrays have after tokens."""
    tokens = arrays[0].shape[0]
    if rows.longest == 1:
        rows = rows._replace(write=rows.write[:, :1])  # no other column has a state
    one = jax.eval_shape(run, tuple(x[:1, None] for x in arrays), slots[:1].astype(jnp.float32))[0]
    outputs = jnp.zeros((tokens, *one.shape[2:]), one.dtype)
    arrays, slots, rows, outputs = _alike(arrays, slots, rows, outputs)
    if rows.longest == 1 and one_by_one:
        return _one_by_one(run, arrays, outputs, slots, rows, one_by_one)
    states, alone = started(slots, rows).astype(jnp.float32), last_tokens_alone(rows.longest, rows.write.shape[1])
    if rows.longest is None or rows.longest > alone:
        outputs, states = _in_chunks(run, arrays, outputs, states, rows, alone, chunk_size)
    missing = alone - rows.write.shape[1]
    write = jnp.pad(rows.write, ((0, 0), (0, max(missing, 0))), constant_values=slots.shape[0])

    def step(n: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        outputs, states, slots = carry
        place = rows.lengths - np.int32(alone) + n
        at = jnp.where(place >= 0, rows.starts + place, tokens)
        here = tuple(jnp.take(x, at, axis=0, mode="fill", fill_value=0)[:, None] for x in arrays)
        found, states = run(here, states)
        outputs = outputs.at[at].set(found[:, 0], mode="drop")
        column = lax.dynamic_index_in_dim(write, np.int32(alone - 1) - n, 1, keepdims=False)
        return outputs, states, written(slots, column, states)

    carry = outputs, states, slots
    if alone == 1:
        outputs, _, slots = step(jnp.int32(0), carry)
    else:
        outputs, _, slots = lax.fori_loop(jnp.int32(0), jnp.int32(alone), step, carry)
    return outputs, slots


def _alike(arrays: Tokens, slots: jax.Array, rows: Rows, outputs: jax.Array) -> Any:
    arrays, slots, traced, outputs = alike((arrays, slots, rows._replace(longest=None), outputs))
    return arrays, slots, traced._replace(longest=rows.longest), outputs


def _one_by_one(
    run: Run, arrays: Tokens, outputs: jax.Array, slots: jax.Array, rows: Rows, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Rows of one token: those that write a state, then those that don't. Of a row a block of heads at a time."""
    write = rows.write[:, 0]
    group = jnp.where(rows.lengths == 0, 2, jnp.where(write < slots.shape[0], 0, 1))
    order = jnp.argsort(group)

    def place(n: Any) -> tuple[jax.Array, jax.Array]:
        """(the row, the block of its heads)."""
        n = jnp.minimum(n, np.int32(len(order) * blocks - 1))
        return order[lax.div(n, np.int32(blocks))], lax.rem(n, np.int32(blocks))

    def start(x: jax.Array, at: jax.Array, block: jax.Array) -> tuple[jax.Array, ...]:
        return (at, block * np.int32(x.shape[1] // blocks), *(jnp.int32(0),) * (x.ndim - 2))

    def cut(x: jax.Array, at: jax.Array, block: jax.Array) -> jax.Array:
        """[1, heads of a block, ...]."""
        return lax.dynamic_slice(x, start(x, at, block), (1, x.shape[1] // blocks, *x.shape[2:]))

    def stored(n: Any, slots: jax.Array) -> jax.Array:
        """The state before the n-th token."""
        row, block = place(n)
        none = jnp.where(rows.fresh[row], np.float32(0), np.float32(np.nan))
        has = ~rows.fresh[row] & (rows.read[row] < slots.shape[0])
        return jnp.where(has, cut(slots, rows.read[row], block).astype(jnp.float32), none)

    def token(n: Any, outputs: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, block = place(n)
        at = rows.starts[row]
        found, state = run(tuple(cut(x, at, block)[None] for x in arrays), before)
        return lax.dynamic_update_slice(outputs, found[0], start(outputs, at, block)), state.astype(slots.dtype)

    def writing(n: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The next state is read here, as a slot that is read where another is written would be copied with all others.
        outputs, slots, before = carry
        outputs, state = token(n, outputs, before)
        row, block = place(n)
        slots = lax.dynamic_update_slice(slots, state, start(slots, write[row], block))
        return outputs, slots, stored(n + 1, slots)

    kept, live = (jnp.sum(group <= n, dtype=jnp.int32) * np.int32(blocks) for n in (0, 1))
    first = stored(jnp.int32(0), slots)
    outputs, slots, _ = lax.fori_loop(jnp.int32(0), kept, writing, (outputs, slots, first))
    outputs = lax.fori_loop(kept, live, lambda n, outputs: token(n, outputs, stored(n, slots))[0], outputs)
    return outputs, slots


def _in_chunks(
    run: Run, arrays: Tokens, outputs: jax.Array, states: jax.Array, rows: Rows, alone: int, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """All but the last `alone` tokens of each row."""
    tokens = arrays[0].shape[0]
    most = tokens if rows.longest is None else min(tokens, rows.longest)
    size = min(chunk_size, 1 << max(most - alone - 1, 0).bit_length())
    counts = jnp.maximum(rows.lengths - np.int32(alone), 0)
    chunks = (counts + np.int32(size - 1)) // np.int32(size)
    ends = jnp.cumsum(chunks)
    # A chunk may begin less than its size before the end.
    arrays = tuple(jnp.pad(x, [(0, size), *[(0, 0)] * (x.ndim - 1)]) for x in arrays)
    outputs = jnp.pad(outputs, [(0, size), *[(0, 0)] * (outputs.ndim - 1)])
    places = jnp.arange(size, dtype=jnp.int32)

    def chunk(n: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, states = carry
        row = jnp.sum(ends <= n, dtype=jnp.int32)
        done = (n - ends[row] + chunks[row]) * np.int32(size)
        at, count = rows.starts[row] + done, counts[row] - done

        def only(x: jax.Array, other: Any) -> jax.Array:
            return jnp.where((places < count).reshape(-1, *[1] * (x.ndim - 1)), x, other)

        here = tuple(only(lax.dynamic_slice_in_dim(x, at, size), 0)[None] for x in arrays)
        found, state = run(here, lax.dynamic_index_in_dim(states, row, 0))
        before = lax.dynamic_slice_in_dim(outputs, at, size)
        outputs = lax.dynamic_update_slice_in_dim(outputs, only(found[0], before), at, 0)
        return outputs, lax.dynamic_update_slice_in_dim(states, state, row, 0)

    outputs, states = lax.fori_loop(jnp.int32(0), ends[-1], chunk, (outputs, states))
    return outputs[:tokens], states
