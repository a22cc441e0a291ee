"""What a plan says of a mask given as an array: that it isn't known, or what it is and how to declare that; and that `causal`,
by default, applies to it too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...masks import Mask
from ...masks.recognise import recognise
from ...planning.notes import Note, note
from ...planning.problem import AttentionProblem, LeafShape
from ..call.options import Options

__all__ = ["causal_by_default", "default_notes", "dense_notes", "hides_later_keys", "value_notes"]

_ALL_CELLS = 1 << 24  # checked whole, in tens of milliseconds; of larger masks only some rows
_ROWS = 64


def dense_notes(leaves: Sequence[LeafShape]) -> list[str]:
    """A note for each array of [.., q, kv] in the mask; an array with one query or one key has no structure to declare."""
    return [note("mask.array_unknown", shape=list(leaf.shape)) for leaf in leaves if _has_rows(leaf.name, leaf.shape)]


def causal_by_default(options: Options, default_causal: bool) -> bool:
    """Whether `causal` applies to an array mask because the metadata has it, not because the call says so."""
    return options.mask_is_array and options.causal is None and default_causal


def default_notes(leaves: Sequence[LeafShape], q_len: int) -> list[str]:
    """A note for an array mask to which `causal` applies by default: an info if it has one row for all queries, like padding."""
    shape = next((leaf.shape for leaf in leaves if leaf.name == "mask"), None)
    if shape is None or q_len == 1:
        return []
    return [note("mask.array_causal", severity=None if _has_rows("mask", shape) else "info", shape=list(shape))]


def hides_later_keys(problem: AttentionProblem, array: Any) -> bool | None:
    """Whether an array mask shows a query a key after its own position, which `causal` then hides; None if that isn't known."""
    first, sizes = problem.query_offset, (problem.q_len, problem.kv_len)
    # Inside the caller's own shard_map an array may be a part of the mask.
    if first is None or problem.q_len == 1 or array.shape[-2:] != sizes:
        return None
    if not _readable(array) or array.dtype != np.bool_:
        return None
    rows, cells = _cells(array, problem.q_len)
    return bool((cells & (np.arange(problem.kv_len) > rows[:, None] + first)).any())


def value_notes(notes: Sequence[str], problem: AttentionProblem, leaves: Sequence[Any]) -> tuple[str, ...]:
    """The same notes if the arrays' values are known: what each array is replaces 'not known'."""
    updated, mask, q_len, kv_len = list(notes), problem.mask, problem.q_len, problem.kv_len

    def place_of(code: str, array: Any) -> int | None:
        return next((n for n, text in enumerate(updated) if _is_of(text, code, array.shape)), None)

    for array in leaves:
        causal = place_of("mask.array_causal", array)
        if causal is not None and hides_later_keys(problem, array) is False:
            del updated[causal]
        at = place_of("mask.array_unknown", array)
        if _readable(array) and array.dtype == np.bool_ and at is not None:
            updated[at] = _known(array, mask, q_len, kv_len)
    return tuple(updated)


def _is_of(text: str, code: str, shape: Sequence[int]) -> bool:
    return isinstance(text, Note) and text.code == code and text.values["shape"] == list(shape)


def _cells(array: Any, q_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to read, and their cells [batch, heads, rows, kv]. Of a large mask these are the first row, the last and some in
    between, of the first plane."""
    is_complete = array.size <= _ALL_CELLS
    rows = np.arange(q_len) if is_complete else np.unique(np.linspace(0, q_len - 1, _ROWS).astype(int))
    with jax.ensure_compile_time_eval():
        return rows, np.asarray(array) if is_complete else np.asarray(array[:1, :1, rows])


def _known(array: Any, mask: Mask, q_len: int, kv_len: int) -> Note:
    planes, is_complete = array.shape[0] * array.shape[1], array.size <= _ALL_CELLS
    rows, cells = _cells(array, q_len)
    recognised = recognise(cells.reshape(-1, len(rows), kv_len), rows, q_len, kv_len)
    if recognised is None:
        return note("mask.array_unstructured", shape=list(array.shape))
    name = f"mask: the array {list(array.shape)} is {recognised.describe()}"
    if not is_complete:
        name += f" in the {len(rows)} rows" + (f" of the first of {planes} planes" if planes > 1 else "") + " looked at"
    if recognised.bind(0) in [part for part in mask.conjuncts() if part.is_static]:
        return note("mask.array_declared", array=name)
    if recognised.describe() == "full":
        return note("mask.array_full", array=name)
    short = '"causal": true or ' if recognised.describe() == "causal" else ""
    words = f'{short}"mask": {json.dumps(recognised.to_dict())}'
    return note("mask.array_structured", array=name, words=words)


def _readable(array: Any) -> bool:
    if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return isinstance(array, np.ndarray) or (isinstance(array, jax.Array) and array.is_fully_addressable)


def _has_rows(name: str, shape: Sequence[int]) -> bool:
    return name == "mask" and shape[-2] != 1 and shape[-1] != 1
