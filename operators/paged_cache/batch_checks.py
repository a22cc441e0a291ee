"""What is wrong with a batch whose values are known, naming the row; and the same check inside a compiled step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...errors import InputError, InputTypeError, a_type, is_whole, shown
from ...masks.int_arrays import is_integer
from .known_sizes import known_sizes
from .sequence_shards import whole_table

__all__ = ["batch_problem", "check_later", "first_true", "int32_arrays", "int32_numbers", "rows_problem"]

_INT32 = np.iinfo(np.int32)


def int32_numbers(name: str, value: Any) -> np.ndarray:
    """int32 [n] from whole numbers that fit in int32. Errors: InputTypeError, InputError."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise InputError(f"{name} has rows of different lengths; wanted [rows].") from error
    if array.size == 0:
        array = array.astype(np.int32)
    if not is_integer(array.dtype):
        raise InputTypeError(f"{name} has dtype {array.dtype}; wanted whole numbers, [rows].")
    if array.ndim != 1:
        raise InputError(f"{name} has shape {array.shape}; wanted [rows].")
    wide = np.flatnonzero((array > _INT32.max) | (array < _INT32.min))
    if wide.size:
        raise InputError(f"row {wide[0]}: {name} is {shown(int(array[wide[0]]))}; wanted a number that fits in int32.")
    return array.astype(np.int32)


def longest_row(max_q_len: Any) -> int | None:
    """The most tokens of a row, as declared; None if there may be any number. Errors: InputError."""
    if max_q_len is None:
        return None
    if not is_whole(max_q_len, 1, numpy=True):
        raise InputError(f"max_q_len={shown(max_q_len)}; wanted a whole number from 1 on, or None for any.")
    return int(max_q_len)


def int32_arrays(kind: str, arrays: Mapping[str, Any]) -> None:
    """Refuse arrays of a batch of sizes that aren't numbers, and of another dtype than int32. Errors: InputError,
    InputTypeError."""
    known_sizes(**arrays)
    for name, array in arrays.items():
        if not hasattr(array, "dtype") or array.dtype != np.int32:
            got = getattr(array, "dtype", a_type(array))
            raise InputTypeError(f"{name} is {got}; wanted int32: {kind}.make checks and converts.")


def batch_problem(
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: np.ndarray,
    pages: int,
    page_size: int,
    tokens: int | None = None,
    window: int | None = None,
    writes: bool = True,
) -> str:
    """The first problem found, '' if there is none. `pages` and `tokens` count those of a shard. `window`: the most tokens that a
    query sees, so that earlier pages may be padding. `writes`: whether the step writes its tokens' keys."""
    if page_table.ndim == kv_lens.ndim + 2:
        page_table = whole_table(page_table, pages)
    if kv_lens.ndim == 1:
        return _shard_problem(cu_q_lens, kv_lens, page_table, int(num_seqs), pages, page_size, tokens, window, writes)
    for shard in range(len(kv_lens)):
        arrays = cu_q_lens[shard], kv_lens[shard], page_table[shard]
        if problem := _shard_problem(*arrays, int(num_seqs[shard]), pages, page_size, tokens, window, writes):
            return f"shard {shard}, {problem}"
    return ""


def check_later(
    arrays: Sequence[Any],
    pages: int,
    page_size: int,
    tokens: int | None,
    window: int | None = None,
    writes: bool = True,
) -> None:
    """The same check for traced arrays: it runs on the host during the step, which then fails with the message."""

    def check(*values: np.ndarray) -> None:
        starts, lens, table, count = (np.asarray(value) for value in values)
        problem = batch_problem(starts, lens, table, count, pages, page_size, tokens, window, writes)
        if problem:
            raise InputError(problem)

    jax.debug.callback(check, *arrays)


def rows_problem(starts: np.ndarray, lens: np.ndarray, count: int, tokens: int | None) -> str:
    """The first problem of the rows of a shard [rows + 1], [rows] and their number, '' if there is none."""
    if not 0 <= count <= len(lens):
        return f"num_seqs is {count}; wanted 0 to {len(lens)}, the rows of the batch."
    starts, lens = starts[: count + 1].astype(np.int64), lens[:count].astype(np.int64)
    q_lens = np.diff(starts)
    if starts[0] != 0:
        return f"row 0: cu_q_lens starts at {starts[0]}; wanted 0, the first token."
    if (row := first_true(q_lens < 0)) is not None:
        return f"row {row}: cu_q_lens falls from {starts[row]} to {starts[row + 1]}; wanted the sum of the rows' query lengths."
    if tokens is not None and starts[-1] > tokens:
        row = first_true(starts[1:] > tokens)
        return f"row {row}: cu_q_lens goes to {starts[-1]}, but there are {tokens} tokens; wanted at most as many."
    if (row := first_true(q_lens > lens)) is not None:
        return (
            f"row {row}: {q_lens[row]} queries and kv_len {lens[row]}; wanted at least as many: kv_lens count the tokens that "
            "are appended."
        )
    return ""


def _shard_problem(
    starts: np.ndarray,
    lens: np.ndarray,
    table: np.ndarray,
    count: int,
    pages: int,
    page_size: int,
    tokens: int | None,
    window: int | None,
    writes: bool,
) -> str:
    if problem := rows_problem(starts, lens, count, tokens):
        return problem
    starts, lens, live_table = (array.astype(np.int64) for array in (starts[: count + 1], lens[:count], table[:count]))
    q_lens, width = np.diff(starts), table.shape[1]
    if (at := first_true((table < 0) | (table > pages))) is not None:
        row, slot = divmod(at, width)
        return f"row {row}: page id {table[row, slot]}; wanted 0 to {pages - 1}, or {pages} for padding."
    needed = -(-lens // page_size)
    slots = np.arange(width)
    first = np.zeros_like(lens) if window is None else np.maximum(lens - q_lens - window + 1, 0) // page_size
    used = (slots >= first[:, None]) & (slots < needed[:, None])
    missing = used & (live_table == pages)
    if (at := first_true(missing)) is not None:
        row, slot = divmod(at, width)
        return _missing(row, slot, int(lens[row]), int(needed[row]), int(first[row]), page_size, window)
    if (row := first_true(needed > width)) is not None:
        return f"row {row}: kv_len {lens[row]} needs {needed[row]} pages of {page_size}, but the table has {width}."
    if not writes:
        return ""
    written = used & (slots >= ((lens - q_lens) // page_size)[:, None]) & (q_lens > 0)[:, None]
    readers = np.bincount(live_table[used], minlength=pages + 1)
    if (at := first_true(written & (readers[live_table] > 1))) is not None:
        row, slot = divmod(at, width)
        page = live_table[row, slot]
        others = [int(r) for r in np.flatnonzero((used & (live_table == page)).any(1)) if r != row]
        shared = f"row {others[0]} reads too" if others else "the same row has twice"
        return f"row {row}: its tokens go to page {page}, which {shared}; copy the page first."
    return ""


def _missing(row: int, slot: int, length: int, needed: int, first: int, page_size: int, window: int | None) -> str:
    if window is None or not first:
        return f"row {row}: kv_len {length} needs {needed} pages of {page_size}, but the table has {slot}."
    return (
        f"row {row}: page number {slot} is padding; with kv_len {length} and a window of {window} tokens its queries see pages "
        f"{first} to {needed - 1} of {page_size}. Release pages after the step, and grow a sequence before it."
    )


def first_true(wrong: np.ndarray) -> int | None:
    """The flat index of the first True; None if there is none."""
    return int(wrong.argmax()) if wrong.any() else None
