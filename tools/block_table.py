"""Choose block sizes for the shapes of real models on every TPU generation, and ship them.

    python tools/block_table.py --search WORK.json     compile what WORK.json lacks, then write the table
    python tools/block_table.py --write WORK.json      only write operators/splash/shipped.json and benchmarks/block-choices.md

For each shape of tests/data/model_shapes.json (bfloat16, mode train, one device) the first candidates of both passes of attnops'
splash kernels are compared by static cycles. The cycles of a tile don't depend on the length, so they are read from compiling
short sequences, once for all shapes with the same head dims and soft cap. Where a candidate takes at least 1 % fewer cycles than
the heuristic's sizes, the cheapest choice that compiles at the real length becomes a row; elsewhere plans need none. Candidates
with more code for a tile than the heuristic allows are left out. Nothing is run. Requires libtpu.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from block_page import TARGETS, write

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.operators.choices.shipped import table_key
from attnops.operators.splash.pass_cost import is_short_code
from attnops.planning import Plan
from attnops.verify.call import verify_call
from attnops.verify.clock_worker import ClockWorker
from attnops.verify.generations import clock_rate
from attnops.verify.local_call import LocalProblem
from attnops.verify.static_clock import TileCycles
from attnops.verify.tile_counts import kernel_bodies, kernel_cycles
from attnops.verify.topology import described_mesh
from attnops.verify.tune import readable_kernels

ROOT = Path(__file__).resolve().parent.parent
SHAPES = json.loads((ROOT / "tests" / "data" / "model_shapes.json").read_text())["shapes"]
MOST = 4  # candidates per pass
WORTH = 0.99  # of the heuristic's cycles, at most, for a row: tiles of other lengths differ by about as much
SHORT = 2048


class Work:
    """What has been compiled, in a file that is written as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"tiles": {}, "choices": {}}
        if path.exists():
            self.data = json.loads(path.read_text())
        self._lock = threading.Lock()
        self._workers: dict[tuple[str, int], ClockWorker] = {}

    def put(self, part: str, name: str, value: Any) -> None:
        with self._lock:
            self.data[part][name] = value
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.data, indent=1))
            os.replace(temporary, self.path)
        print(name, value, flush=True)

    def tile(self, decided: Plan, part: str, kernel: str, fields: dict[str, Any]) -> TileCycles | str:
        """The cycles of a kernel's tile at a short length, or why there are none."""
        problem = decided.problem
        name = ", ".join(
            (
                problem.device_kind,
                f"dim {problem.head_dim} {problem.value_dim}",
                *([] if problem.logits_soft_cap is None else ["soft cap"]),
                *([] if problem.operand("bias") is None else ["bias"]),
                kernel,
                *(f"{field} {value}" for field, value in sorted(fields.items())),
            )
        )
        if name not in self.data["tiles"]:
            with self._lock:
                worker = self._workers.setdefault((kernel, threading.get_ident()), ClockWorker(kernel))
            outcome = worker.ask(problem.device_kind, _short(decided, fields), part, fields)
            self.put("tiles", name, outcome.failure if outcome.cycles is None else list(outcome.cycles))
        found = self.data["tiles"][name]
        return found if isinstance(found, str) else TileCycles(tuple(found[0]), *found[1:])

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


def mask_of(shape: dict[str, Any]) -> Mask:
    mask: Mask = Causal() if shape["causal"] else Full()
    if shape["window"]:
        mask = mask & SlidingWindow(*shape["window"])
    return mask & Chunked(shape["chunk"]) if shape["chunk"] else mask


def planned(shape: dict[str, Any], target: str, fields: dict[str, Any]) -> tuple[Any, dict[str, Any], Plan]:
    """(operation, arguments, plan) of a shape on one device of a target."""
    mesh = described_mesh(target)
    one = jax.sharding.Mesh(mesh.devices.reshape(-1)[:1], ("device",))
    # Heads don't change a tile: one kv head with its group compiles quickly.
    group = shape["hq"] // shape["hkv"]

    def tensor(length: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length, heads, dim), jnp.bfloat16)

    arguments: dict[str, Any] = {
        "query": tensor(shape["seq_q"], group, shape["head_dim"]),
        "key": tensor(shape["seq_kv"], 1, shape["head_dim"]),
        "value": tensor(shape["seq_kv"], 1, shape["head_dim_v"]),
        "mask": mask_of(shape),
        "softmax_scale": shape["softmax_scale"],
        "logits_soft_cap": shape["logits_soft_cap"],
    }
    if shape["sinks"]:
        arguments["softmax_aux"] = jax.ShapeDtypeStruct((group,), jnp.float32)
    if shape["bias"]:
        arguments["bias"] = jax.ShapeDtypeStruct((1, group, *shape["bias"][2:]), jnp.bfloat16)
    configs = {"splash": fields}
    declared = OperationMetadata(mesh=one, operation_configs=configs, fallback="error", tuning="off")
    operation = OperationRegistry.create("splash", declared)
    return operation, arguments, operation.plan(**arguments).require()


def _short_length(fields: dict[str, Any]) -> int:
    """At least two of the largest blocks."""
    sizes = [v for n, v in fields.items() if n.startswith("block_") and isinstance(v, int)]
    return max(SHORT, 2 * max(sizes, default=0))


def _short(decided: Plan, fields: dict[str, Any]) -> LocalProblem:
    """The same heads over few tokens, causal."""
    problem, placement = decided.problem, decided.placement
    length = _short_length(fields)
    bias = tuple(x._replace(shape=(1, 1, length, length)) for x in problem.operands if x.name == "bias")
    short = replace(problem, mask=Causal(0), q_len=length, kv_len=length, operands=bias)
    return LocalProblem.of(
        short, replace(placement, local=placement.local._replace(batch=1, q_len=length, kv_len=length))
    )


def resolved(decided: Plan, fields: dict[str, Any]) -> Any:
    """The config with these fields."""
    assert decided.method is not None
    asked = replace(decided.problem, config=decided.problem.config.with_fields(fields))
    return decided.runs.resolve(asked, decided.placement)


def offered(decided: Plan) -> dict[str, list[dict[str, Any]]]:
    """The candidates of each pass: the heuristic's sizes, and those that compile about as fast."""
    found = decided.runs.candidates(decided.problem, decided.placement)
    return {
        part: [
            *ways[:1],
            *(
                fields
                for fields in ways[1:]
                if is_short_code(decided.problem, decided.placement, resolved(decided, fields), part)
            ),
        ]
        for part, ways in found.items()
    }


def cost(work: Work, decided: Plan, part: str, fields: dict[str, Any]) -> int | str:
    """Static cycles of a pass with these fields, or why there are none."""
    problem, placement = decided.problem, decided.placement
    config, total = resolved(decided, fields), 0
    for name, kernel in readable_kernels(decided.runs, config, part == "backward"):
        cycles = work.tile(decided, part, name, fields)
        if isinstance(cycles, str):
            return cycles
        compiled = kernel_bodies(kernel, Causal(0), _short_length(fields))
        total += kernel_cycles(problem, placement, config, kernel, cycles, compiled)
    return total


def search(work: Work, shape: dict[str, Any], generation: str) -> None:
    """Choose for one shape on one generation, and have the compiler confirm it."""
    _, _, decided = planned(shape, TARGETS[generation], {})
    key = table_key(decided.problem, decided.placement)
    if key in work.data["choices"]:
        return
    candidates = offered(decided)
    ranked: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    own: dict[str, int | str] = {}
    for part, ways in candidates.items():
        costs = [(cost(work, decided, part, fields), fields) for fields in ways[:MOST]]
        own[part], found = costs[0][0], [(cycles, fields) for cycles, fields in costs if isinstance(cycles, int)]
        most = WORTH * own[part] if isinstance(own[part], int) else float("inf")
        # With the heuristic's own sizes: the better ones may not compile at the real length.
        kept = [one for one in found if one[0] <= most or one[1] is ways[0]]
        ranked[part] = sorted(kept, key=lambda one: one[0])

    def of_own(part: str, cycles: int) -> dict[str, float]:
        heuristic = own[part]
        return {part: round(cycles / heuristic, 4)} if isinstance(heuristic, int) else {}

    row: dict[str, Any] = {"shape": shape["name"], "generation": generation}
    if ranked and all(ways and ways[0][1] is candidates[part][0] for part, ways in ranked.items()):
        work.put("choices", key, row | {"heuristic": True})
        return
    # Forward and backward choices in the order of their cost; the first pair that compiles at the real length.
    pairs = [(f, b) for b in ranked.get("backward", []) for f in ranked.get("forward", [])]
    for forward, backward in sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0])[:4]:
        fields = forward[1] | backward[1]
        operation, arguments, _ = planned(shape, TARGETS[generation], fields)
        report = verify_call(operation, arguments, generation)
        if report.outcome.accepted:
            kernels = {k.name: k.vmem_used for one in report.passes for k in one.kernels or ()}
            rate = clock_rate(decided.problem.device_kind)
            row |= {
                "fields": fields,
                "ratio": of_own("forward", forward[0]) | of_own("backward", backward[0]),
                "seconds_a_head": [cycles / rate / decided.problem.q_heads for cycles, _ in (forward, backward)],
                "vmem": kernels,
                "vmem_limit": report.plan.config.vmem_limit_bytes,  # type: ignore[attr-defined]
            }
            break
        row["failure"] = "; ".join(one.failure.message for one in report.passes if one.failure is not None)
    work.put("choices", key, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=Path, metavar="WORK.json")
    parser.add_argument("--write", type=Path, metavar="WORK.json")
    parser.add_argument("--generation", action="append", choices=tuple(TARGETS))
    options = parser.parse_args()
    if options.search is None and options.write is None:
        parser.error("one of --search and --write is required")
    work = Work(options.search or options.write)
    if options.search is not None:

        def of_generation(generation: str) -> None:
            for shape in SHAPES:
                if shape["seq_q"] > 1:
                    search(work, shape, generation)

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(of_generation, options.generation or TARGETS))
        finally:
            work.close()
    write(work.data["choices"])


if __name__ == "__main__":
    main()
