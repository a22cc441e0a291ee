"""A declared step over slots: its sizes, and a random batch whose rows are of the declared mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..planning.recurrent.step_operands import STATE_BATCH
from ..sharding import OperandTable
from .call_declaration import CallDeclaration

__all__ = ["STEP_FIELDS", "batch_shapes", "drawn_batch", "is_step", "step_sizes"]

STEP_FIELDS = {"rows": "batch", "tokens": "q_len"}
"""The dims of a step that are fields of a call: the rows of the batch and the tokens of all."""

_MOST_PAST = 100


def is_step(table: OperandTable) -> bool:
    """Whether a table of a recurrence is that of its step over slots."""
    return "state" in table


def step_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes with those that follow: of the batch's arrays, and one slot for each state that the rows keep unless more are
    declared. Those of arrays without shards have none. Errors: ConfigError."""
    sizes = {"columns": 1, "shards": None, **given}
    rows, tokens, shards = sizes["rows"], sizes["tokens"], sizes["shards"] or 1
    if tokens is None:
        return sizes
    kept = rows * sizes["columns"]
    sizes.setdefault("slots", kept)
    for name in ("rows", "tokens", "slots"):
        if sizes[name] % shards:
            field = f"call.{STEP_FIELDS[name]}" if name in STEP_FIELDS else f"call.dims.{name}"
            raise ConfigError(f"{field}={sizes[name]} over call.dims.shards={shards}; wanted a multiple of them.")
    for name, why in (("slots", "one for each state that is kept"), ("tokens", "as many of each row as states")):
        if sizes[name] < kept:
            field = f"call.{STEP_FIELDS[name]}" if name in STEP_FIELDS else f"call.dims.{name}"
            raise ConfigError(
                f"{field}={sizes[name]} for {rows} rows of {sizes['columns']} states; wanted {kept}, {why}."
            )
    return sizes


def batch_shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each array of the batch."""
    shards = sizes["shards"] or 1
    own = {"rows": sizes["rows"] // shards, "bounds": sizes["rows"] // shards + 1, "columns": sizes["columns"]}
    lead = () if sizes["shards"] is None else (shards,)
    return {row.name: (*lead, *(own[dim] for dim in row.dims[1:])) for row in STATE_BATCH}


def drawn_batch(random: np.random.Generator, sizes: Mapping[str, Any], call: CallDeclaration) -> dict[str, np.ndarray]:
    """The arrays of a batch. In mode autoregressive each row has as many tokens as states; else they share the tokens, and
    some have no past."""
    shards = sizes["shards"] or 1
    rows, columns = sizes["rows"] // shards, sizes["columns"]
    tokens, slots = sizes["tokens"] // shards, sizes["slots"] // shards
    lens = np.full((shards, rows), columns)
    if (call.mode or "").strip("_") not in ("autoregressive", "decode"):
        for shard in range(shards):
            lens[shard] += random.multinomial(tokens - rows * columns, np.full(rows, 1 / rows))
    pasts = random.integers(1, _MOST_PAST, (shards, rows)) * (random.random((shards, rows)) < 0.7)
    write = np.stack([random.permutation(slots)[: rows * columns].reshape(rows, columns) for _ in range(shards)])
    arrays = {
        "cu_q_lens": np.concatenate([np.zeros((shards, 1), int), np.cumsum(lens, 1)], 1),
        "kv_lens": lens + pasts,
        "num_seqs": np.full(shards, rows),
        "read_slots": write[..., 0],  # each row writes where it reads
        "write_slots": write,
    }
    shapes = batch_shapes(sizes)
    return {name: x.reshape(shapes[name]).astype(np.int32) for name, x in arrays.items()}
