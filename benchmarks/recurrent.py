"""Recurrent operations on a CPU against the ways to do without: ratios of medians, interleaved, in one process.

    python benchmarks/recurrent.py [--json FILE] [--torch PYTHON] [--cycles]

The shape is Qwen3-Next's with 16 heads of 128, 4096 tokens, float32. `scan` goes token by token in jax; `transformers` is the
chunked function of its Qwen3-Next in torch, run by the Python that --torch names, in turns with ours. A decode step is compared
with reading and writing the states once. A ratio below 1 means that ours is faster.

--cycles does nothing of this: it compiles the TPU kernels for described devices, and prints what their schedules take for 128
tokens of 4 heads of 128 in bfloat16, without waits for memory. FILE keeps what it has of the other kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attnops import OperationMetadata, OperationRegistry
from attnops.operators.recurrent.kernel.tpu_sizes import BACKWARD, FORWARD, KEEPING
from attnops.verify.clock_worker import ClockWorker
from attnops.verify.topology import described_mesh
from attnops.verify.tune_recurrence import RecurrenceSearch

HEADS, DIM, TOKENS, RUNS = 16, 128, 4096, 7
RULES = ("gated_delta_rule", "kda", "simple_gla", "gla", "mamba2")
TARGETS = ("v6e:2x2", "tpu7x:2x2x1")
CELLS = (("gated_delta_rule", 64), ("gated_delta_rule", 128), ("kda", 128), ("simple_gla", 128))
_TORCH = """
import statistics, sys, time, torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule
torch.manual_seed(0)
heads, tokens, dim = map(int, sys.argv[1:4])
query, key, value = (torch.randn(1, tokens, heads, dim) for _ in range(3))
decay, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
for line in sys.stdin:
    with torch.no_grad():
        start = time.perf_counter()
        rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
        print(time.perf_counter() - start, flush=True)
"""


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


def against_scan() -> dict[str, float]:
    """The gated delta rule in chunks and token by token."""
    call, operation = arrays_of("gated_delta_rule"), OperationRegistry.create("gated_delta_rule")
    chunks = jax.jit(lambda call: operation(**call).attention_outputs)
    seconds = medians({"chunks": timed(chunks, call), "scan": timed(jax.jit(by_token), call)})
    return {**seconds, "ratio": seconds["chunks"] / seconds["scan"]}


def against_torch(python: str) -> dict[str, float]:
    """The gated delta rule and transformers' function in torch, in turns."""
    call, operation = arrays_of("gated_delta_rule"), OperationRegistry.create("gated_delta_rule")
    chunks = jax.jit(lambda call: operation(**call, normalise_qk=True).attention_outputs)
    command = [python, "-c", _TORCH, *map(str, (HEADS, TOKENS, DIM))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def theirs() -> float:
            worker.stdin.write("\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
            return float(worker.stdout.readline())  # type: ignore[union-attr]

        seconds = medians({"chunks": timed(chunks, call), "torch": theirs})
        worker.stdin.close()
    return {**seconds, "ratio": seconds["chunks"] / seconds["torch"]}


def decode(rule: str, sequences: int = 16) -> dict[str, float]:
    """A token of each sequence, against reading and writing the states once."""
    operation = OperationRegistry.create(rule)
    call = arrays_of(rule, 1, sequences)
    states = [jnp.zeros((sequences, HEADS, DIM, DIM), jnp.float32) for _ in range(2)]
    step = jax.jit(
        lambda call, state: (lambda o: (o.attention_outputs, o.state))(operation(**call, initial_state=state))
    )
    touch = jax.jit(lambda state: state * np.float32(0.999))
    seconds = medians({"step": timed(step, call, states[0]), "states": timed(touch, states[1])}, 51)
    return {**seconds, "ratio": seconds["step"] / seconds["states"]}


def cycles() -> dict[str, dict[str, dict[str, float]]]:
    """Device -> rule and chunk -> kernel -> static cycles of 128 tokens of 4 heads."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    workers = {name: ClockWorker(name) for name in (FORWARD, KEEPING, BACKWARD)}
    for topology, (rule, chunk) in itertools.product(TARGETS, CELLS):
        mesh = Mesh(np.asarray(described_mesh(topology).devices).reshape(-1)[:1], ("dp",))
        metadata = OperationMetadata(mesh=mesh, operation_configs={rule: {"chunk_size": chunk}}, tuning="off")
        shapes = {
            name: jax.ShapeDtypeStruct((1, 512, 4, *x.shape[3:]), x.dtype if name == "decay" else jnp.bfloat16)
            for name, x in arrays_of(rule, 8).items()
        }
        of_cell = found.setdefault(topology.split(":")[0], {}).setdefault(f"{rule} {chunk}", {})
        for mode, part in (("prefill", "forward"), ("train", "backward")):
            plan: Any = OperationRegistry.create(rule, metadata).plan(**shapes, mode=mode)
            search = RecurrenceSearch(plan.operation, plan.method, plan.problem, plan.placement)
            compiled, fields, kernels = search.scheduled(part, {})
            for name, whole in kernels.items():
                outcome = workers[name].ask(plan.problem.device_kind, compiled, part, fields)
                if outcome.cycles is None:
                    raise SystemExit(f"{topology} {rule} {chunk}: {outcome.failure}")
                of_cell[name.removeprefix("attnops_recurrent_")] = whole(outcome.cycles) / 4
        print(topology, rule, chunk, of_cell, flush=True)
    for worker in workers.values():
        worker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torch", help="a Python that has torch and transformers")
    parser.add_argument("--cycles", action="store_true", help="only static cycles of the TPU kernels")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.cycles:
        found["cycles"] = cycles()
    else:
        found["scan"] = against_scan()
        if options.torch:
            found["transformers"] = against_torch(options.torch)
        found["passes"] = {rule: forward_and_gradient(rule) for rule in RULES}
        found["decode"] = {rule: decode(rule) for rule in RULES}
    print(json.dumps(found, indent=1))
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else {}
        found = before | found
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
