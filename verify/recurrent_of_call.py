"""What a planned call of a recurrent operation means, in float64: its gates, then the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..planning.recurrent.step_operands import CONV_ROWS
from ..planning.tables.table_problem import TableProblem
from .recurrent_reference import Recurrence, reference_convolution, reference_decays, reference_linear, reference_mamba1

__all__ = ["recurrent_reference"]


def recurrent_reference(
    problem: TableProblem, arrays: Mapping[str, Any], operation: Any, config: Any
) -> dict[str, np.ndarray]:
    """attention_outputs and state, in the call's layout, and windows of a step's convolutions. arrays: by name, as given."""
    if "cu_q_lens" in arrays:
        return _reference_of_step(problem, arrays, operation, config)
    standard = {name: _moved(operation.operands[name], x, problem.layout, "bthd") for name, x in arrays.items()}
    found = _reference(standard, operation, config, problem.option)
    named = {"attention_outputs": found.outputs, "state": found.state}
    return {row.name: _moved(row, named[row.name], "bthd", problem.layout) for row in operation.results}


def _reference_of_step(
    problem: TableProblem, arrays: Mapping[str, Any], operation: Any, config: Any
) -> dict[str, np.ndarray]:
    """Row by row; a row's states of drafts are those of its first tokens alone."""
    wide = {n: x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float64) for n, x in _on_host(arrays)}
    table, state = operation.operands, wide["state"].copy()
    (outputs,) = (x for x in problem.results if x.name == "attention_outputs")
    found, kept = np.zeros(outputs.shape), {name: x.copy() for name, x in wide.items() if name.endswith(CONV_ROWS[2])}
    of_batch = [wide[name] for name in ("cu_q_lens", "kv_lens", "num_seqs", "read_slots", "write_slots")]
    shards = len(of_batch[2]) if of_batch[2].ndim else 1
    bounds, lens, counts, read, write = (x.reshape(shards, *x.shape[of_batch[2].ndim :]) for x in of_batch)
    own_tokens, own_slots = problem.size["tokens"] // shards, problem.size["slots"] // shards
    for shard, row in ((s, r) for s in range(shards) for r in range(int(counts[s]))):
        first, last = (int(bounds[shard, n]) + shard * own_tokens for n in (row, row + 1))
        fresh = lens[shard, row] <= last - first
        slot = shard * own_slots + read[shard, row]
        before = {n: np.zeros(x.shape[1:]) if fresh else wide[n][slot] for n, x in (*kept.items(), ("state", state))}
        for column in range(min(last - first, write.shape[2])):
            own = slice(first, last - column)
            call = {
                name: x[own][None] if table[name].dims[:1] == ("tokens",) and x.ndim == len(table[name].dims) else x
                for name, x in wide.items()
                if name in table and name not in before
            }
            after = _convolved(call, before, problem.option)
            one = _reference(call | {"initial_state": before["state"][None]}, operation, config, problem.option)
            if column == 0:
                found[own] = one.outputs[0]
            if write[shard, row, column] < own_slots:
                slot = shard * own_slots + write[shard, row, column]
                state[slot] = one.state[0]
                for name, window in after.items():
                    kept[name][slot] = window
    return {"attention_outputs": found, "state": state, **kept}


def _convolved(
    call: dict[str, np.ndarray], before: Mapping[str, np.ndarray], options: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Convolve the arrays of a row in `call` that have a weight there; the windows after it."""
    last, (weight, bias, end) = {}, CONV_ROWS
    for name in [one for one in before if one.endswith(end)]:
        of = name.removesuffix(f"_{end}")
        x, by = call[of], call[f"{of}_{weight}"]
        flat = x.reshape(*x.shape[:2], -1)
        offset = call[f"{of}_{bias}"].reshape(-1) if f"{of}_{bias}" in call else None
        start = before[name].reshape(1, len(before[name]), -1)
        found = reference_convolution(flat, by.reshape(len(by), -1), offset, start)
        call[of] = _activated(found.outputs, options.get("conv_activation")).reshape(x.shape)
        last[name] = found.state[0].reshape(before[name].shape)
    return last


def _activated(x: np.ndarray, activation: str | None) -> np.ndarray:
    activated: np.ndarray = x / (1 + np.exp(-x)) if activation == "silu" else x
    return activated


def _on_host(arrays: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    return [(name, np.asarray(x)) for name, x in arrays.items()]


def _moved(row: Any, x: Any, given: str, wanted: str) -> np.ndarray:
    x = np.asarray(x)
    x = x.astype(np.float64) if not np.issubdtype(x.dtype, np.integer) else x
    have, want = row.dims_in(given), row.dims_in(wanted)
    if len(have) != x.ndim:
        return x
    if "batch" in have and "batch" not in want:
        x, have = x[0], have[1:]
    if "batch" in want and "batch" not in have:
        x, have = x[None], ("batch", *have)
    return np.transpose(x, [have.index(dim) for dim in want])


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def _reference(arrays: dict[str, np.ndarray], operation: Any, config: Any, options: Mapping[str, Any]) -> Recurrence:
    rest: dict[str, Any] = {
        name: arrays[name] for name in ("initial_state", "segment_ids", "lengths") if name in arrays
    }
    if "weight" in arrays:
        found = reference_convolution(arrays["x"], arrays["weight"], arrays.get("bias"), **rest)
        return found._replace(outputs=_activated(found.outputs, options.get("activation")))
    if "dt" in arrays:
        return _mamba(arrays, config, rest)
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    if options.get("normalise_qk"):
        query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + config.normalise_eps) for x in (query, key))
    decay = arrays.get("decay")
    if decay is None:
        decay = reference_decays(operation.name.removeprefix("ragged_"), value.shape[2])
    decay = np.broadcast_to(decay, value.shape[:3]) if decay.ndim == 1 else decay
    decay = decay[..., None] if decay.ndim == 3 else decay
    if "A_log" in arrays:  # the model's own projection
        bias = arrays.get("dt_bias", np.zeros(value.shape[2]))
        bias = bias[:, None] if bias.ndim == 1 else bias
        decay = -np.exp(arrays["A_log"])[:, None] * _softplus(decay + bias)
    beta = None
    if "beta" in operation.operands:
        beta = arrays.get("beta", np.ones(value.shape[:3]))
        if config.beta_form == "sigmoid":
            beta = config.beta_max / (1 + np.exp(-beta))
    scale = options.get("scale") or key.shape[3] ** -0.5
    return reference_linear(query, key, value, decay, beta, **rest, scale=scale)


def _mamba(arrays: dict[str, np.ndarray], config: Any, rest: Mapping[str, Any]) -> Recurrence:
    x, dt, rate = arrays["x"], arrays["dt"], arrays["A"]
    dt = dt + arrays.get("dt_bias", 0.0)
    dt = _softplus(dt) if config.dt_softplus else dt
    heads = x.ndim == 4
    if heads and (config.dt_min, config.dt_max) != (None, None):
        dt = np.clip(dt, config.dt_min, config.dt_max)
    if heads:
        decay = (dt * rate)[..., None]
        found = reference_linear(arrays["C"], arrays["B"], dt[..., None] * x, decay, None, **rest, scale=1.0)
    else:
        found = reference_mamba1(x, dt, rate, arrays["B"], arrays["C"], **rest)
    if "D" not in arrays:
        return found
    skipped = (arrays["D"][:, None] if heads else arrays["D"]) * x
    if "lengths" in arrays:
        counts = np.arange(x.shape[1])[None] < arrays["lengths"][:, None]
        skipped = np.where(counts.reshape(*counts.shape, *[1] * (x.ndim - 2)), skipped, 0)
    return found._replace(outputs=found.outputs + skipped)
