"""The estimates of `attnops advise` against measured times, on eight virtual CPU devices: do they rank strategies correctly?

    python benchmarks/advise.py --json FILE [--only fit|held] [--report]

Each case is a call on one sequence split over all eight devices (mask, length, heads, head dim, dtype, pass), run with every
strategy that it allows: gather, ring contiguous and zigzag, ulysses, ulysses_ring on 2 x 4. For each strategy a case has
three figures, measured in turns: the median and the minimum of wall-clock seconds, and the median of processor
seconds, which other work on the machine disturbs least. The rates of
attnops.advising.cpu_rates are fitted to the cases of FIT, by least squares of the logarithm; Kendall's tau between estimate and
measurement is taken over the strategies of each case of HELD, which are different cases. What FILE has isn't measured again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

DEVICES, REPEATS, LEAST_SECONDS = 8, 7, 0.5
TWO_AXES = {"query_sequence_axis": ["cp", "sp"], "key_sequence_axis": ["cp", "sp"]}
WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "gather": ({"sp": 8}, {"sequence_parallel": "gather"}),
    "ring": ({"sp": 8}, {"sequence_parallel": "ring", "ring_order": "contiguous"}),
    "zigzag": ({"sp": 8}, {"sequence_parallel": "ring", "ring_order": "zigzag"}),
    "ulysses": ({"sp": 8}, {"sequence_parallel": "ulysses"}),
    "ulysses_ring": ({"cp": 2, "sp": 4}, {"sequence_parallel": "ulysses_ring", "partition_axis": TWO_AXES}),
}
WINDOW = 512
FIGURES = ("median", "least", "processor")


def case(mask: str, length: int, heads: int, kv_heads: int, dim: int, dtype: str, backward: bool) -> str:
    """A name that describes the whole case."""
    return f"{mask} {length} {heads}/{kv_heads} D{dim} {dtype} {'both' if backward else 'forward'}"


FIT = [
    case(*one)
    for one in (
        ("causal", 1024, 8, 8, 64, "float32", False), ("causal", 4096, 8, 8, 64, "float32", False),
        ("full", 2048, 8, 8, 64, "float32", False), ("window", 4096, 8, 8, 64, "float32", False),
        ("causal", 2048, 8, 8, 128, "float32", True), ("full", 1024, 8, 8, 64, "float32", True),
        ("window", 2048, 8, 8, 64, "float32", True), ("causal", 2048, 16, 8, 64, "bfloat16", False),
    )
]  # fmt: skip
HELD = [
    case(*one)
    for one in (
        ("causal", 2048, 8, 8, 64, "float32", False), ("causal", 3072, 8, 8, 64, "float32", False),
        ("causal", 6144, 8, 8, 64, "float32", False), ("causal", 4096, 8, 8, 32, "float32", False),
        ("causal", 4096, 16, 8, 64, "float32", False), ("causal", 2048, 8, 8, 256, "float32", False),
        ("full", 1024, 8, 8, 128, "float32", False), ("full", 3072, 8, 8, 64, "float32", False),
        ("full", 4096, 8, 8, 64, "float32", False), ("full", 2048, 16, 8, 32, "float32", False),
        ("window", 2048, 8, 8, 64, "float32", False), ("window", 6144, 8, 8, 64, "float32", False),
        ("window", 4096, 16, 16, 64, "float32", False), ("causal", 1024, 8, 8, 64, "float32", True),
        ("causal", 3072, 8, 8, 64, "float32", True), ("causal", 2048, 16, 16, 64, "float32", True),
        ("full", 2048, 8, 8, 64, "float32", True), ("window", 4096, 8, 8, 64, "float32", True),
        ("full", 2048, 8, 8, 64, "bfloat16", False), ("causal", 4096, 8, 8, 64, "bfloat16", False),
    )
]  # fmt: skip


def operation(name: str, way: str, mesh: Any) -> tuple[Any, dict[str, Any]]:
    """(vanilla with a strategy on a mesh, the arguments of its call)."""
    import jax

    from attnops import Causal, Full, OperationMetadata, OperationRegistry, SlidingWindow

    mask, length, heads, dim, dtype, which = name.split()
    q_heads, kv_heads = (int(n) for n in heads.split("/"))
    metadata = OperationMetadata(mesh=mesh, tuning="off", runtime_dtype=dtype, **WAYS[way][1])
    masks = {"causal": Causal(), "full": Full(), "window": Causal() & SlidingWindow(WINDOW - 1, 0)}

    def array(heads: int) -> Any:
        return jax.ShapeDtypeStruct((1, int(length), heads, int(dim[1:])), dtype)

    mode = "train" if which == "both" else "prefill"
    arguments = {
        "query": array(q_heads),
        "key": array(kv_heads),
        "value": array(kv_heads),
        "mask": masks[mask],
        "mode": mode,
    }
    return OperationRegistry.create("vanilla", metadata), arguments


def ways(name: str) -> list[str]:
    """The strategies of a case; zigzag is only for causal masks."""
    return [way for way in WAYS if way != "zigzag" or name.startswith("causal")]


def measure(name: str) -> dict[str, dict[str, float]]:
    """Seconds of each strategy, measured in turns."""
    import jax
    import jax.numpy as jnp

    from attnops.sharding import virtual_mesh
    from attnops.verify.call_program import call_program

    runs: dict[str, Any] = {}
    for way in ways(name):
        op, arguments = operation(name, way, virtual_mesh(WAYS[way][0]))
        plan = op.plan(**arguments)
        if plan.implementation is None:
            raise SystemExit(f"{name}, {way}: {plan.refusal()}")
        program, shapes = call_program(op, arguments, plan, name.endswith("both"))

        def drawn(struct: Any) -> Any:
            made = jax.random.normal(jax.random.key(0), struct.shape, jnp.float32).astype(struct.dtype)
            return jax.device_put(made, struct.sharding)

        arrays = jax.tree.map(drawn, shapes)
        jax.block_until_ready(program(arrays))
        runs[way] = program, arrays
    taken: dict[str, list[float]] = {way: [] for way in runs}
    processor: dict[str, list[float]] = {way: [] for way in runs}
    while min(map(len, taken.values())) < REPEATS or min(map(sum, taken.values())) < LEAST_SECONDS:
        for way, (program, arrays) in runs.items():
            start, before = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(arrays))
            taken[way].append(time.perf_counter() - start)
            processor[way].append(time.process_time() - before)
        if len(next(iter(taken.values()))) >= 40:
            break
    return {
        way: {
            "median": statistics.median(times),
            "least": min(times),
            "processor": statistics.median(processor[way]),
        }
        for way, times in taken.items()
    }


def predicted(name: str, way: str, rates: Any) -> float:
    """The estimate's seconds."""
    from attnops.advising.estimate import estimate
    from attnops.advising.machine import cpu_machine

    return estimate(planned(name, way), cpu_machine(DEVICES, rates)).seconds


@functools.cache
def planned(name: str, way: str) -> Any:
    """The call's plan."""
    from attnops.sharding import virtual_mesh

    op, arguments = operation(name, way, virtual_mesh(WAYS[way][0]))
    return op.plan(**arguments)


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's tau: pairs in the same order minus those in opposite order, over all pairs."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    return sum((1 if (a[i] - a[j]) * (b[i] - b[j]) > 0 else -1) for i, j in pairs) / len(pairs)


def fitted(cells: dict[str, dict[str, dict[str, float]]], figure: str) -> Any:
    """The rates that predict the cases of FIT best, by coordinate descent on logarithms.

    A case's overall offset counts for a tenth: what matters is the order of its strategies.
    """
    import math
    from dataclasses import fields, replace

    from attnops.advising.cpu_rates import CpuRates

    def error(rates: CpuRates) -> float:
        total = 0.0
        for name in FIT:
            off = [math.log(predicted(name, way, rates) / found[figure]) for way, found in cells[name].items()]
            mean = statistics.mean(off)
            total += sum((one - mean) ** 2 for one in off) + 0.1 * len(off) * mean**2
        return total

    best = CpuRates()
    least = error(best)
    for factor in (4.0, 2.0, 1.4, 1.15):
        moved = True
        while moved:
            moved = False
            for one in fields(CpuRates):
                for by in (factor, 1 / factor):
                    changed = replace(best, **{one.name: getattr(best, one.name) * by})
                    if (found := error(changed)) < least * 0.9995:
                        best, least, moved = changed, found, True
    return best


def report(data: dict[str, Any]) -> None:
    """Fit to each figure, and print the taus of the held-out cases."""
    from dataclasses import asdict

    cells = data["cells"]
    data["fitted"], data["tau"] = {}, {}
    for figure in FIGURES:
        rates = fitted(cells, figure)
        data["fitted"][figure] = asdict(rates)
        print(f"\n{figure}: " + ", ".join(f"{name}={value:.3g}" for name, value in asdict(rates).items()))
        taus = {}
        for name in (name for name in HELD if name in cells):
            measured = [found[figure] for found in cells[name].values()]
            guesses = [predicted(name, way, rates) for way in cells[name]]
            taus[name] = kendall(measured, guesses)
            row = "  ".join(
                f"{way} {a:.3f} / {b:.3f}" for way, a, b in zip(cells[name], measured, guesses, strict=True)
            )
            print(f"{name:38} tau {taus[name]:5.2f}  {row}")
        if taus:
            data["tau"][figure] = {"mean": statistics.mean(taus.values()), "cases": taus}
            print(f"{len(taus)} cases, Kendall's tau {data['tau'][figure]['mean']:.3f} on average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", choices=("fit", "held"))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    import jax

    data: dict[str, Any] = {"jax": jax.__version__, "cells": {}}
    if options.json.exists():
        data = json.loads(options.json.read_text())
    for name in (
        () if options.report else [*(FIT if options.only != "held" else ()), *(HELD if options.only != "fit" else ())]
    ):
        if name not in data["cells"]:
            data["cells"][name] = measure(name)
            data["load"] = os.getloadavg()
            options.json.write_text(json.dumps(data, indent=1) + "\n")
            print(name, data["cells"][name], flush=True)
    report(data)
    options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
