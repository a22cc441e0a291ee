"""What a plan says of a mask given as an array: that it isn't known, or what it is and how to declare that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..masks import Mask
from ..masks.recognise import recognise
from ..planning.problem import LeafShape

__all__ = ["dense_notes", "value_notes"]

_ALL_CELLS = 1 << 24  # checked whole, in tens of milliseconds; of larger masks only some rows
_ROWS = 64


def dense_notes(leaves: Sequence[LeafShape]) -> list[str]:
    """A note for each array of [.., q, kv] in the mask; an array with one query or one key has no structure to declare."""
    return [_unknown(leaf.shape) for leaf in leaves if _has_rows(leaf.name, leaf.shape)]


def value_notes(notes: Sequence[str], mask: Mask, leaves: Sequence[Any], q_len: int, kv_len: int) -> tuple[str, ...]:
    """The same notes if the arrays' values are known: what each array is replaces 'not known'."""
    found = list(notes)
    for array in leaves:
        if not _readable(array) or array.dtype != np.bool_ or _unknown(array.shape) not in found:
            continue
        at = found.index(_unknown(array.shape))
        found[at : at + 1] = _known(array, mask, q_len, kv_len)
    return tuple(found)


def _unknown(shape: Sequence[int]) -> str:
    return (
        f"mask: what the array {list(shape)} hides isn't known to the plan; if it is causal or a window, declare that "
        "(call.causal, call.sliding_window or call.mask) and pass no array: hidden blocks are then skipped"
    )


def _known(array: Any, mask: Mask, q_len: int, kv_len: int) -> list[str]:
    planes, whole = array.shape[0] * array.shape[1], array.size <= _ALL_CELLS
    # The rows read of a large mask: the first, the last and some in between, of the first plane.
    rows = np.arange(q_len) if whole else np.unique(np.linspace(0, q_len - 1, _ROWS).astype(int))
    with jax.ensure_compile_time_eval():
        cells = np.asarray(array) if whole else np.asarray(array[:1, :1, rows])
    said = recognise(cells.reshape(-1, len(rows), kv_len), rows, q_len, kv_len)
    if said is None:
        return [f"mask: the array {list(array.shape)} is none of full, prefix, causal, window; it is read as it is"]
    name = f"mask: the array {list(array.shape)} is {said.describe()}"
    if not whole:
        name += f" in the {len(rows)} rows" + (f" of the first of {planes} planes" if planes > 1 else "") + " looked at"
    if said.bind(0) in [part for part in mask.conjuncts() if part.is_static]:
        return [f"{name}, which is declared already; pass no array: reading it has no use"]
    if said.describe() == "full":
        return [f"{name}: it hides nothing; pass no array: reading it has no use"]
    short = '"causal": true or ' if said.describe() == "causal" else ""
    words = f'{short}"mask": {json.dumps(said.to_dict())}'
    return [f"{name}; declare {words} in call and pass no array: hidden blocks are then skipped"]


def _readable(array: Any) -> bool:
    if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return isinstance(array, np.ndarray) or (isinstance(array, jax.Array) and array.is_fully_addressable)


def _has_rows(name: str, shape: Sequence[int]) -> bool:
    return name == "mask" and shape[-2] > 1 and shape[-1] > 1
