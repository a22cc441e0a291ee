"""What is wrong with a batch over slots whose values are known, naming the row; and the same check inside a compiled step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...errors import InputError
from .batch_checks import first_true, rows_problem

__all__ = ["check_states_later", "state_problem"]


def state_problem(
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    num_seqs: np.ndarray,
    read_slots: np.ndarray,
    write_slots: np.ndarray,
    *,
    slots: int,
    tokens: int | None = None,
    longest: int | None = None,
) -> str:
    """The first problem found, '' if there is none. `slots` and `tokens` count those of a shard; longest: the declared number of
    tokens that no row exceeds."""
    if kv_lens.ndim == 1:
        return _shard_problem(cu_q_lens, kv_lens, int(num_seqs), read_slots, write_slots, slots, tokens, longest)
    for shard in range(len(kv_lens)):
        arrays = cu_q_lens[shard], kv_lens[shard], int(num_seqs[shard]), read_slots[shard], write_slots[shard]
        if problem := _shard_problem(*arrays, slots, tokens, longest):
            return f"shard {shard}, {problem}"
    return ""


def check_states_later(arrays: Mapping[str, Any], slots: int, tokens: int, longest: int | None) -> None:
    """The same check for traced arrays: it runs on the host during the step, which then fails with the message."""

    def check(arrays: Mapping[str, Any]) -> None:
        values = {name: np.asarray(x) for name, x in arrays.items()}
        if problem := state_problem(**values, slots=slots, tokens=tokens, longest=longest):
            raise InputError(problem)

    jax.debug.callback(check, dict(arrays))


def _shard_problem(
    starts: np.ndarray,
    lens: np.ndarray,
    count: int,
    read: np.ndarray,
    write: np.ndarray,
    slots: int,
    tokens: int | None,
    longest: int | None,
) -> str:
    if problem := rows_problem(starts, lens, count, tokens):
        return problem
    q_lens = np.diff(starts[: count + 1].astype(np.int64))
    if longest is not None and (row := first_true(q_lens > longest)) is not None:
        return f"row {row}: {q_lens[row]} tokens, but max_q_len={longest}; pass the longest, or leave it out."
    for name, ids in (("read_slots", read[:, None]), ("write_slots", write)):
        if (at := first_true((ids < 0) | (ids > slots))) is not None:
            row, column = divmod(at, ids.shape[1])
            return f"row {row}: {name} has {ids[row, column]}; wanted 0 to {slots - 1}, or {slots} for none."
    read, write = read[:count], write[:count]
    reads = (q_lens > 0) & (lens[:count] > q_lens)
    if (row := first_true(reads & (read == slots))) is not None:
        return (
            f"row {row}: a past of {lens[row] - q_lens[row]} tokens, but no slot is read; wanted the slot of its state."
        )
    live = write < slots
    early = live & (np.arange(write.shape[1]) >= np.maximum(q_lens, 0)[:, None])
    if (at := first_true(early)) is not None:
        row, column = divmod(at, write.shape[1])
        return (
            f"row {row}: write_slots has a slot in column {column}, for the state without its last {column} tokens, but the row "
            f"has {q_lens[row]}; wanted {slots} there, for none."
        )
    owner = np.full(slots + 1, -1)
    for row, column in zip(*np.nonzero(live), strict=True):
        slot = write[row, column]
        if owner[slot] >= 0:
            return f"row {row}: slot {slot} is written by row {owner[slot]} too; wanted a slot for each state that is kept."
        owner[slot] = row
    of_read = owner[np.where(reads, read, slots)]
    if (row := first_true((of_read >= 0) & (of_read != np.arange(count)))) is not None:
        return (
            f"row {row}: reads slot {read[row]}, which row {of_read[row]} writes in the same step; copy the slot first."
        )
    return ""
