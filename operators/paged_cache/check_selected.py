"""check_selected: whether selected positions are keys of their tokens' sequences, each once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from ...errors import InputError
from ...masks.int_arrays import known_values
from .batch import RaggedBatch

__all__ = ["check_selected"]


def check_selected(batch: RaggedBatch, selected: Any, *, debug: bool) -> None:
    """Refuse positions [tokens, n] that aren't keys of their sequence, or come twice; -1 is none. Traced ones are checked while
    the step runs, with `debug`. Errors: InputError with the token and the position."""
    arrays = (selected, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    known = [known_values(x) for x in arrays]
    if all(x is not None for x in known):
        _check(batch.shards, *known)
    elif debug:
        jax.debug.callback(partial(_check, batch.shards), *arrays)


def _check(shards: int | None, selected: Any, starts: Any, lengths: Any, counts: Any) -> None:
    selected = np.asarray(selected)
    parts = 1 if shards is None else shards
    rows = (np.asarray(x).reshape(parts, -1) for x in (starts, lengths, counts))
    of_shard = len(selected) // parts
    for shard, (starts, lengths, counts) in enumerate(zip(*rows, strict=True)):
        for row in range(int(counts[0])):
            first, last = (int(x) + shard * of_shard for x in starts[row : row + 2])
            own = selected[first:last]
            outside = (own < -1) | (own >= lengths[row])
            if outside.any():
                token, at = np.argwhere(outside)[0]
                raise InputError(
                    f"selected[{first + token}] has the position {own[token, at]}, but sequence {row} has {lengths[row]} keys; "
                    f"wanted 0 to {lengths[row] - 1}, or -1 for none."
                )
            ordered = np.sort(own, axis=1)
            twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
            if twice.any():
                token, at = np.argwhere(twice)[0]
                raise InputError(
                    f"selected[{first + token}] has the position {ordered[token, at]} twice; wanted each once."
                )
