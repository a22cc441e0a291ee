"""Recurrent operations on a CPU against the ways to do without, and against other projects: ratios of medians, interleaved.

    python benchmarks/recurrent.py [--json FILE] [--python PYTHON]... [--maxtext FOLDER] [--only PART]...

The shape is Qwen3-Next's with 16 heads of 128, 4096 tokens, float32. `scan` goes token by token in jax. `rivals` are the
functions that recurrent_rival.py names, each run by the first --python that has its library, in turns with ours, on the same
arrays; FOLDER is a checkout of MaxText. What can't be imported is named. `decode` compares one token of each sequence with
reading and writing the states once, and says what reading them before takes: XLA for CPUs makes a loop over all states for
what is read and another for what is written. `slots` is the same over slots, in place, of which others stay as they are. A
ratio below 1 means that ours is faster. FILE keeps the parts that weren't run.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recurrent_rival import RIVALS

from attnops import OperationRegistry, StateBatch

HEADS, DIM, TOKENS, RUNS = 16, 128, 4096, 7
CHANNELS, STATE_DIM = 16384, 16  # of Mamba-1: as many numbers as the states of the others have
RULES = ("gated_delta_rule", "kda", "simple_gla", "gla", "mamba2")
DECODES = (*RULES, "mamba1")
PARTS = ("scan", "rivals", "passes", "decode", "slots")
LONG = 4.0  # seconds of a run from which on one is enough


def medians(ways: dict[str, Callable[[], float]], runs: int = RUNS) -> dict[str, float]:
    """Seconds of each, in turn."""
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            times[name].append(way())
    return {name: statistics.median(of) for name, of in times.items()}


def timed(function: Callable[..., Any], *arrays: Any) -> Callable[[], float]:
    """A way to run a compiled function, that returns its seconds."""

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        return time.perf_counter() - start

    return run


def arrays_of(rule: str, tokens: int = TOKENS, batch: int = 1) -> dict[str, jax.Array]:
    """Random arrays of a call by name."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    wide = (batch, tokens, HEADS, DIM)
    if rule == "mamba1":
        x = draw(batch, tokens, CHANNELS)
        call = {"x": x, "dt": jnp.exp(draw(*x.shape) - 2), "A": -jnp.exp(draw(CHANNELS, STATE_DIM))}
        return call | {"B": draw(batch, tokens, STATE_DIM), "C": draw(batch, tokens, STATE_DIM)}
    if rule == "mamba2":
        call = {"x": draw(*wide), "dt": jnp.exp(draw(*wide[:3]) - 2), "A": -jnp.exp(draw(HEADS))}
        return call | {"B": draw(*wide), "C": draw(*wide)}
    key = draw(*wide)
    call = {"query": draw(*wide), "key": key / jnp.linalg.norm(key, axis=-1, keepdims=True), "value": draw(*wide)}
    call["decay"] = -jnp.exp(draw(*(wide if rule in ("kda", "gla") else wide[:3])) - 2)
    if rule in ("gated_delta_rule", "kda"):
        call["beta"] = jax.nn.sigmoid(draw(*wide[:3]))
    return call


def by_token(call: dict[str, jax.Array]) -> jax.Array:
    """The gated delta rule as a scan over tokens."""

    def token(state: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value, decay, beta = at
        state = jnp.exp(decay)[..., None, None] * state
        update = beta[..., None] * (value - jnp.einsum("bhk,bhkv->bhv", key, state))
        state = state + key[..., None] * update[..., None, :]
        return state, DIM**-0.5 * jnp.einsum("bhk,bhkv->bhv", query, state)

    first = jnp.zeros((call["query"].shape[0], HEADS, DIM, DIM))
    names = ("query", "key", "value", "decay", "beta")
    return jax.lax.scan(token, first, tuple(jnp.moveaxis(call[name], 1, 0) for name in names))[1]


def forward_and_gradient(rule: str) -> dict[str, float]:
    """Seconds of both, their ratio, and the temporary bytes of both per token, at two lengths."""
    operation = OperationRegistry.create(rule)

    def outputs(call: dict[str, jax.Array]) -> jax.Array:
        return operation(**call).attention_outputs

    forward, both = jax.jit(outputs), jax.jit(jax.value_and_grad(lambda call: outputs(call).sum()))
    call = arrays_of(rule)
    seconds = medians({"forward": timed(forward, call), "both": timed(both, call)})
    temporary = {}
    for tokens in (TOKENS, 2 * TOKENS):
        memory = both.lower(arrays_of(rule, tokens)).compile().memory_analysis()
        temporary[f"temporary_{tokens}"] = memory.temp_size_in_bytes
    return {**seconds, "both/forward": seconds["both"] / seconds["forward"], **temporary}


def products(chunk: int = 64) -> Callable[[], float]:
    """A way to make the products of one chunk alone, of the sizes that the gated delta rule has, that returns its seconds."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((HEADS, *shape), np.float32))

    def each(
        rows: jax.Array, state: jax.Array, keys: jax.Array, inverse: jax.Array, weights: jax.Array
    ) -> list[jax.Array]:
        product = functools.partial(jnp.einsum, precision="highest")
        solved, read = product("nij,njv->niv", inverse, keys), product("nik,nkv->niv", rows, state)
        more = product("nik,njk->nij", rows, keys), product("nij,njv->niv", weights, keys)
        return [solved, read, *more, product("nik,niv->nkv", keys, keys)]

    arrays = draw(2 * chunk, DIM), draw(DIM, DIM), draw(chunk, DIM), draw(chunk, chunk), draw(chunk, chunk)
    return timed(jax.jit(each), *arrays)


def against_scan() -> dict[str, float]:
    """The gated delta rule in chunks and token by token; and the products of all chunks alone, as a part of the latter."""
    call, operation = arrays_of("gated_delta_rule"), OperationRegistry.create("gated_delta_rule")
    chunks, chunk = jax.jit(lambda call: operation(**call).attention_outputs), 64
    ways = {"chunks": timed(chunks, call), "scan": timed(jax.jit(by_token), call), "products": products(chunk)}
    seconds = medians(ways)
    seconds["products"] *= TOKENS // chunk
    return {**seconds, "ratio": seconds["chunks"] / seconds["scan"], "least": seconds["products"] / seconds["scan"]}


def interleaved(ours: Callable[[], float], worker: subprocess.Popen[str]) -> dict[str, float]:
    """Seconds of both, in turn."""
    stdin, stdout = worker.stdin, worker.stdout
    assert stdin is not None
    assert stdout is not None

    def theirs() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    ways = {"ours": ours, "theirs": theirs}
    first = {name: way() for name, way in ways.items()}
    return first if first["theirs"] > LONG else medians(ways, 5)


def against(name: str, pythons: list[str], maxtext: Path | None) -> dict[str, Any]:
    """One rival: its version, how far its outputs are from ours, and seconds of both in turn; or why it doesn't run."""
    rule, why = RIVALS[name], "no --python"
    call = arrays_of(rule)
    operation = OperationRegistry.create(rule)
    run = jax.jit(lambda call: operation(**call).attention_outputs)
    outputs, worker = np.asarray(run(call), np.float32), Path(__file__).with_name("recurrent_rival.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "call.npz"
        np.savez(path, **{name: np.asarray(x) for name, x in call.items()})
        for python in pythons:
            command = [python, str(worker), name, *([] if maxtext is None else [str(maxtext)])]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{path}\n")
                process.stdin.flush()
                word, _, rest = process.stdout.readline().strip().partition(" ")
                if word != "ready":
                    why = rest or "it ended before it ran"
                    continue
                apart = float(np.abs(np.load(path.with_suffix(".npy")) - outputs).max())
                seconds = interleaved(timed(run, call), process)
                process.stdin.close()
            found = {"rule": rule, "version": rest, "apart": apart, **seconds}
            return found | {"ratio": seconds["ours"] / seconds["theirs"]}
    return {"rule": rule, "missing": why}


def rivals(pythons: list[str], maxtext: Path | None) -> dict[str, Any]:
    """Every rival; where ours is slower; and the mean of the ratios, geometric."""
    found: dict[str, Any] = {}
    for name in RIVALS:
        found[name] = against(name, pythons, maxtext)
        print(name, found[name], flush=True)
    ratios = {name: x["ratio"] for name, x in found.items() if "ratio" in x}
    if ratios:
        found["mean"] = statistics.geometric_mean(ratios.values())
        found["slower"] = [name for name, ratio in ratios.items() if ratio > 1]
    return found


def state_of(rule: str, count: int) -> jax.Array:
    """So many states."""
    return jnp.zeros((count, CHANNELS, STATE_DIM) if rule == "mamba1" else (count, HEADS, DIM, DIM), jnp.float32)


def in_place(step: Callable[..., Any], state: jax.Array, *arrays: Any) -> Callable[[], float]:
    """A way to run a step whose state is donated and is the last of what it returns, that returns its seconds."""
    compiled = jax.jit(step, donate_argnums=0)

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        *_, state = jax.block_until_ready(compiled(state, *arrays))
        return time.perf_counter() - start

    return run


def decode(rule: str, sequences: int = 16) -> dict[str, float]:
    """A token of each sequence, against reading and writing the states once; both with states in place. least: what reading them
    and then reading and writing them takes, against the same."""
    operation, call = OperationRegistry.create(rule), arrays_of(rule, 1, sequences)

    def step(state: jax.Array, call: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        output = operation(**call, initial_state=state)
        return output.attention_outputs, output.state

    states = [state_of(rule, sequences) for _ in range(2)]
    touch = in_place(lambda state: (state * np.float32(0.999),), states[1])
    read = timed(jax.jit(jnp.sum), state_of(rule, sequences))
    seconds = medians({"step": in_place(step, states[0], call), "states": touch, "read": read}, 51)
    least = 1 + seconds["read"] / seconds["states"]
    return {**seconds, "ratio": seconds["step"] / seconds["states"], "least": least}


def slots(rule: str, sequences: int) -> dict[str, float]:
    """The same over twice as many slots, of which every second one is a sequence's; against reading and writing these in place,
    one after the other."""
    name = "ragged_gated_delta_rule_v2" if rule == "gated_delta_rule" else f"ragged_{rule}"
    operation, call = OperationRegistry.create(name), arrays_of(rule, sequences, 1)
    call = {name: x if name == "A" else x[0] for name, x in call.items()}
    own = np.arange(sequences) * 2
    lengths = {"cu_q_lens": np.arange(sequences + 1), "kv_lens": np.full(sequences, 9)}
    batch = StateBatch.make(2 * sequences, **lengths, read_slots=own, write_slots=own[:, None])
    batch = jax.tree.map(jnp.asarray, batch)

    def step(state: jax.Array, call: dict[str, jax.Array], batch: StateBatch) -> tuple[jax.Array, jax.Array]:
        output = operation(**call, state=state, batch=batch, max_q_len=1)
        return output.attention_outputs, output.state

    def touch(state: jax.Array, own: jax.Array) -> tuple[jax.Array]:
        def one(n: Any, state: jax.Array) -> jax.Array:
            read = jax.lax.dynamic_slice_in_dim(state, own[n], 1)
            return jax.lax.dynamic_update_slice_in_dim(state, read * np.float32(0.999), own[n], 0)

        return (jax.lax.fori_loop(0, sequences, one, state),)

    states = [state_of(rule, 2 * sequences) for _ in range(2)]
    ways = {
        "step": in_place(step, states[0], call, batch),
        "states": in_place(touch, states[1], jnp.asarray(own, jnp.int32)),
    }
    seconds = medians(ways, 21)
    return {**seconds, "ratio": seconds["step"] / seconds["states"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", action="append", default=[], help="one that has libraries of rivals; repeatable")
    parser.add_argument("--maxtext", type=Path, help="a checkout of MaxText")
    parser.add_argument("--only", action="append", choices=PARTS, help="only these parts")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "scan": against_scan,
        "rivals": lambda: rivals(options.python, options.maxtext),
        "passes": lambda: {rule: forward_and_gradient(rule) for rule in RULES},
        "decode": lambda: {rule: decode(rule) for rule in DECODES},
        "slots": lambda: {f"{rule} {n}": slots(rule, n) for n in (16, 128) for rule in DECODES},
    }
    found: dict[str, Any] = {"load": Path("/proc/loadavg").read_text().split()[:3]}
    for name in options.only or PARTS:
        found[name] = parts[name]()
        print(name, json.dumps(found[name], indent=1), flush=True)
    if "passes" in found:
        found["passes elsewhere"] = None
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(before | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
