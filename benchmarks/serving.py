"""Attention over pages on this machine: attnops, gathering the pages, jax's reference, ejkernel and attnops' dense decode.

    python benchmarks/serving.py [--cells REGEX] [--rounds N] [--seconds N] [--max-mib N] [--json FILE] [--without NAME,...]
    python benchmarks/serving.py --report --json FILE

Medians of calls that take turns in one process, in changing order, and ratios; below 1 attnops is faster. All must agree, or
the run stops. `even`: all sequences have the whole context; `ragged`: from an eighth of it to all. `chunk N`: the last sequence
has N queries of a prompt, the others decode. Dense decode reads a cache without pages, gathered before the clock starts.
Implementations that aren't installed are left out and listed, as are cells whose pages take more than --max-mib. jax's reference
compiles a program for each sequence, so it is left out from --most-unrolled sequences on. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from serving_rivals import MODELS, RIVALS, Cell, attnops, missing, step_of, versions

FEWEST_ROUNDS, LEAST_SECONDS = 3, 0.5


def all_cells() -> Iterator[Cell]:
    for model in MODELS:
        for dtype in ("float32", "bfloat16"):
            for layout in ("split", "heads"):
                for batch in (1, 16, 64):
                    for context in (256, 1024, 4096, 8192):
                        for lengths in ("even", "ragged") if batch > 1 else ("even",):
                            for chunk in (1, 64, 256):
                                yield Cell(model, dtype, layout, batch, context, lengths, chunk)


def measure(cell: Cell, names: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of each, the median of calls in turns, and ratios to the others; fewer rounds if they take too long."""
    step = step_of(cell)
    calls = {"attnops": attnops(cell, step)}
    calls |= {name: call for name in names if (call := RIVALS[name](cell, step)) is not None}
    results = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
    for name, result in results.items():
        error = float(np.abs(result - results["attnops"]).max())
        assert error < (1e-4 if cell.dtype == "float32" else 3e-2), f"{cell.name}: {name} differs by {error}"
    times: dict[str, list[float]] = {name: [] for name in calls}
    began, order = time.perf_counter(), [*calls]
    for n in itertools.count(1):
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            times[name].append(1e3 * (time.perf_counter() - start))
        order.append(order.pop(0))  # nobody always comes after the same one, with its arrays in the processor's caches
        spent = time.perf_counter() - began
        if (n >= rounds and spent > LEAST_SECONDS) or (n >= FEWEST_ROUNDS and spent > seconds):
            break
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: medians["attnops"] / medians[name] for name in calls if name != "attnops"}
    return {
        "cell": cell.name,
        "model": cell.model,
        "kind": cell.kind,
        "batch": cell.batch,
        "rounds": len(times["attnops"]),
        "ms": medians,
        "ratio": ratios,
    }


def line_of(row: dict[str, Any]) -> str:
    ratios = "  ".join(f"{ratio:.2f} of {name}" for name, ratio in row["ratio"].items())
    return f"{row['cell']:62} {row['ms']['attnops']:9.3f} ms  {ratios}"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """By model, kind of step and batch: cells, cells in which attnops is faster, geometric mean and worst ratio."""
    classes = [("all", rows)]
    for kind in dict.fromkeys((row["model"], row["kind"], row["batch"]) for row in rows):
        model, step, batch = kind
        classes.append(
            (f"{model} {step} batch {batch}", [r for r in rows if (r["model"], r["kind"], r["batch"]) == kind])
        )
    yield f"{'':32} {'against':16} {'cells':>5} {'faster in':>9} {'mean':>6} {'worst':>6}"
    for title, members in classes:
        for name in RIVALS:
            if ratios := [row["ratio"][name] for row in members if name in row["ratio"]]:
                faster, mean = sum(r < 1 for r in ratios), statistics.geometric_mean(ratios)
                yield f"{title:32} {name:16} {len(ratios):5} {faster:9} {mean:6.2f} {max(ratios):6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", help="only cells whose name matches")
    parser.add_argument("--without", default="", help="implementations to leave out, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20, help="per cell; at least three rounds are run")
    parser.add_argument(
        "--max-mib", type=float, default=512, help="leave out cells whose pages take more; a run takes 6 times this"
    )
    parser.add_argument(
        "--most-unrolled", type=int, default=16, help="the most sequences to compile jax's reference for"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--report", action="store_true", help="measure nothing, print what --json has")
    arguments = parser.parse_args()
    if arguments.report:
        found = json.loads(arguments.json.read_text())
        print("\n".join([found["machine"], *map(line_of, found["rows"]), *summary(found["rows"])]))
        return
    absent = missing()
    for name, why in absent.items():
        print(f"{name} is left out: {why}")
    without = {*absent, *filter(None, arguments.without.split(","))}
    if unknown := without - set(RIVALS):
        parser.error(f"--without {', '.join(sorted(unknown))}; the implementations are {', '.join(RIVALS)}")
    names = [name for name in RIVALS if name not in without]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {versions()}"
    print(machine)
    rows = []
    for cell in all_cells():
        if not re.search(arguments.cells, cell.name) or cell.chunk > cell.context // 2:
            continue
        if cell.mib > arguments.max_mib:
            print(f"{cell.name:62} left out: {cell.mib:.0f} MiB of pages", flush=True)
            continue
        unrolled = cell.batch <= arguments.most_unrolled
        here = [name for name in names if unrolled or name != "jax's reference"]
        rows.append(measure(cell, here, arguments.rounds, arguments.seconds))
        jax.clear_caches()
        print(line_of(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
