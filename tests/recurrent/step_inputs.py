"""Random steps over slots, and what the reference says of them, row by row and token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from recurrent_inputs import KINDS, call_of, expected

from attnops import OperationMetadata, OperationRegistry, StateBatch

__all__ = ["MIXES", "STEPS", "Rows", "Step", "convolved", "drawn", "joined", "wanted", "wanted_windows"]

STEPS = {kind: "ragged_gated_delta_rule_v2" if kind == "gated_delta_rule" else f"ragged_{kind}" for kind in KINDS}


@dataclass(frozen=True)
class Rows:
    """Rows of a step of one shard: tokens and past of each, and how many states of drafts are kept."""

    lengths: tuple[int, ...]
    pasts: tuple[int, ...]
    drafts: int = 0


MIXES = {
    "decode": Rows((1, 1, 1, 1), (9, 1, 0, 30)),
    "prefill": Rows((37, 2), (0, 0)),
    "chunks": Rows((17, 20), (33, 5)),
    "mixed": Rows((1, 21, 0, 1, 18, 2), (7, 0, 3, 0, 16, 4)),
    "drafts": Rows((3, 1, 19, 3), (4, 8, 0, 0), drafts=2),
}


@dataclass(frozen=True)
class Step:
    """arrays: by token, without a batch, and those of the operation; the batch of one shard; the rows of both. windows: slots of
    the tokens before convolutions, by the argument's name, with the other arrays of these in `arrays`."""

    kind: str
    arrays: dict[str, np.ndarray]
    state: np.ndarray
    batch: StateBatch
    rows: Rows
    windows: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        return len(self.state)

    def operation(self, metadata: OperationMetadata | None = None, **config: Any) -> Any:
        name = STEPS[self.kind]
        fields = {"chunk_size": 16} if self.kind != "causal_conv1d" else {}
        known = {name: fields | config}
        metadata = OperationMetadata(operation_configs=known) if metadata is None else metadata
        return OperationRegistry.create(name, metadata)

    def run(self, metadata: OperationMetadata | None = None, **options: Any) -> Any:
        return self.operation(metadata)(**self.given, **options)

    @property
    def given(self) -> dict[str, Any]:
        """All arrays by name."""
        return self.arrays | self.windows | {"state": self.state, "batch": self.batch}


def drawn(kind: str, mix: str | Rows, *, seed: int = 0, spare: int = 3, **sizes: Any) -> Step:
    """A step with more tokens, rows and slots than it uses; what isn't used holds NaN."""
    rows, rng = MIXES[mix] if isinstance(mix, str) else mix, np.random.default_rng(seed)
    used, tokens = sum(rows.lengths), sum(rows.lengths) + spare
    call = call_of(kind, batch=1, tokens=tokens, seed=seed, **sizes)
    initial = call.pop("initial_state")
    count, columns = len(rows.lengths), 1 + rows.drafts
    slots = count * (1 + columns) + 2
    ids = [int(x) for x in rng.permutation(slots)]
    state = rng.standard_normal((slots, *initial.shape[1:])).astype(np.float32)
    read, write = [], []
    for row, (length, past) in enumerate(zip(rows.lengths, rows.pasts, strict=True)):
        own = ids.pop()
        read.append(own if past else slots)
        # Every second row writes its state where it was.
        kept = [own if j == 0 and row % 2 else ids.pop() for j in range(min(columns, length))]
        write.append(kept + [slots] * (columns - len(kept)))
        if not past:
            state[own] = np.nan
    table = OperationRegistry.get(STEPS[kind]).operands
    arrays = {}
    for name, x in call.items():
        by_token = "tokens" in table[name].dims and x.ndim > 1
        arrays[name] = x[0].copy() if by_token else x
        if by_token:
            arrays[name][used:] = np.nan
    batch = StateBatch.make(
        slots,
        cu_q_lens=np.cumsum([0, *rows.lengths]),
        kv_lens=[a + b for a, b in zip(rows.lengths, rows.pasts, strict=True)],
        read_slots=read,
        write_slots=write,
        max_sequences=count + 1,
        tokens=tokens,
    )
    return Step(kind, arrays, state, batch, rows)


def convolved(step: Step, *names: str, bias: bool = True, width: int = 4, seed: int = 5) -> Step:
    """The step with convolutions before these arrays; windows that a row may not read hold NaN."""
    rng, arrays, windows = np.random.default_rng(seed), dict(step.arrays), {}

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    for name in names:
        channels = arrays[name].shape[1:]
        arrays[f"{name}_conv_weight"] = normal(width, *channels)
        if bias:
            arrays[f"{name}_conv_bias"] = normal(*channels)
        window = normal(step.slots, width - 1, *channels)
        window[np.isnan(step.state).reshape(step.slots, -1).all(1)] = np.nan
        windows[f"{name}_conv_window"] = window
    return Step(**vars(step) | {"arrays": arrays, "windows": windows})


def wanted(step: Step, activation: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, slots) in float64."""
    state, outputs = step.state.astype(np.float64), None
    starts = np.cumsum([0, *step.rows.lengths])
    tokens = len(next(iter(step.arrays.values())))
    table = OperationRegistry.get(STEPS[step.kind]).operands
    for row, (length, past) in enumerate(zip(step.rows.lengths, step.rows.pasts, strict=True)):
        before = step.state[step.batch.read_slots[row]] if past else np.zeros(step.state.shape[1:])
        for column in range(min(length, step.batch.write_slots.shape[1])):
            own = slice(starts[row], starts[row] + length - column)
            call = {
                name: x[own][None] if "tokens" in table[name].dims and x.ndim > 1 else x
                for name, x in step.arrays.items()
                if "_conv_" not in name
            }
            for name in step.windows:
                of = name.removesuffix("_conv_window")
                mixed = sum(
                    step.arrays[f"{of}_conv_weight"][m].astype(np.float64)
                    * tokens_of(step, of, row)[m : m + length - column]
                    for m in range(step.windows[name].shape[1] + 1)
                )
                mixed = mixed + step.arrays.get(f"{of}_conv_bias", np.zeros(()))
                call[of] = (mixed / (1 + np.exp(-mixed)) if activation == "silu" else mixed)[None]
            found = expected(step.kind, call | {"initial_state": before[None]})
            if outputs is None:
                outputs = np.zeros((tokens, *found.outputs.shape[2:]))
            if column == 0:
                outputs[own] = found.outputs[0]
            if (slot := step.batch.write_slots[row, column]) < step.slots:
                state[slot] = found.state[0]
    assert outputs is not None
    return outputs, state


def tokens_of(step: Step, of: str, row: int) -> np.ndarray:
    """The tokens of a row with those of its window before them, in float64."""
    window, start = step.windows[f"{of}_conv_window"], sum(step.rows.lengths[:row])
    before = window[step.batch.read_slots[row]] if step.rows.pasts[row] else np.zeros(window.shape[1:])
    return np.concatenate([before, step.arrays[of][start : start + step.rows.lengths[row]]]).astype(np.float64)


def wanted_windows(step: Step) -> dict[str, np.ndarray]:
    """The windows after the step: the last tokens of each row, without 0, 1, ... of them."""
    found = {name: x.copy() for name, x in step.windows.items()}
    for name, x in found.items():
        for row, length in enumerate(step.rows.lengths):
            tokens = tokens_of(step, name.removesuffix("_conv_window"), row)
            for column in range(min(length, step.batch.write_slots.shape[1])):
                if (slot := step.batch.write_slots[row, column]) < step.slots:
                    x[slot] = tokens[length - column : length - column + x.shape[1]]
    return found


def joined(steps: list[Step]) -> Step:
    """The steps of several shards as one, with a stacked batch."""
    first = steps[0]
    table = OperationRegistry.get(STEPS[first.kind]).operands
    arrays = {
        name: np.concatenate([step.arrays[name] for step in steps])
        if "tokens" in table[name].dims and x.ndim > 1
        else x
        for name, x in first.arrays.items()
    }
    batch = StateBatch.stack([step.batch for step in steps])
    windows = {name: np.concatenate([step.windows[name] for step in steps]) for name in first.windows}
    return Step(first.kind, arrays, np.concatenate([step.state for step in steps]), batch, first.rows, windows)


def as_arrays(batch: StateBatch) -> StateBatch:
    """The batch as arrays of jax, as a compiled step gets it."""
    return jax.tree.map(jax.numpy.asarray, batch)
