"""The native path against other implementations: time ratio, temporary memory, share of the machine's matrix-product rate.

    python benchmarks/native.py [--minutes N] [--python tokamax=/path/to/python] [--json FILE [--resume]] [--plot FILE]
    python benchmarks/native.py --report --json FILE [--plot FILE]

Every cell is one shape, mask, dtype and pass. In a cell the implementations run in turns, one call each, and the median counts.
Implementations that aren't installed are left out and listed; `--python NAME=PATH` gives one its own environment. The
cells that the goals name come first, the others in a fixed shuffled order, so that a run cut short by --minutes is a fair
sample; cells not reached are listed, and --resume continues with them. --report measures nothing and prints what FILE has.
Another JAX implementation that takes three times as long as attnops, and over three seconds, is stopped, except in the cells
that the goals name: its time is then at least that, shown as <ratio. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RIVALS = ("jax.nn", "einsum", "flax nnx", "ejkernel", "tokamax", "torch", "torch BTHD")
TORCH = ("torch", "torch BTHD")  # on tensors [batch, heads, time, dim], and on tensors as JAX's models have them
# The cells of a batch of caches: those who run there. The others' programs are measured with one sequence.
OF_A_BATCH = ("jax.nn", *TORCH)
WHOLE_LOGITS = ("jax.nn", "einsum", "flax nnx")
HEADS = 8
CELL_SECONDS = 4.0
MOST_ROUNDS = 9
MOST_BYTES = 10 << 30
SETUP_SECONDS = 120.0
# A call of another JAX implementation is stopped after this many times ours, but no sooner than this many seconds; where a
# goal names the cell, and for torch, after the last number.
STOP_RATIO, STOP_SECONDS, GOAL_SECONDS = 3.0, 3.0, 90.0


class Worker:
    """One implementation's process, so that the threads of one library don't disturb another's."""

    def __init__(self, python: str, script: str = "native_worker.py") -> None:
        self.command = [python, str(HERE / script)]
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, text=True
        )

    def ask(self, limit: float = SETUP_SECONDS, **request: Any) -> dict[str, Any]:
        """The answer; after `limit` seconds a fresh process replaces this one, and the answer is {"stopped": limit}."""
        self.send(**request)
        return self.receive(limit)

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def receive(self, limit: float = SETUP_SECONDS) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        answer = self.process.stdout.readline() if ready else ""
        if answer:
            return json.loads(answer)
        self.process.kill()
        self.process.wait()
        self.start()
        return {"error": "the process died"} if ready else {"stopped": limit}


def cells() -> list[dict[str, Any]]:
    """All cells, those that the goals name first."""
    found = []
    for mask, length in itertools.product(("full", "causal", "window", "packed"), (512, 2048, 8192, 16384)):
        for kv_heads, dim, dtype in itertools.product((8, 2), (64, 128), ("float32", "bfloat16")):
            for backward in (False, True):
                found.append(_cell(mask, length, length, kv_heads, dim, dtype, backward))
    for length, kv_heads, dim, dtype in itertools.product((4096, 32768), (8, 2), (64, 128), ("float32", "bfloat16")):
        found.append(_cell("decode", 1, length, kv_heads, dim, dtype, False))
    for batch, length, kind, dtype in itertools.product(
        (1, 4, 8, 16, 32), (1024, 4096, 16384), ("cache", "ragged cache"), ("float32", "bfloat16")
    ):
        found.append(_cell(kind, 1, length, 8, 128, dtype, False) | {"batch": batch, "heads": 32})
    random.Random(0).shuffle(found)
    return sorted(found, key=lambda cell: not _named_by_a_goal(cell))


def _cell(mask: str, q_len: int, kv_len: int, kv_heads: int, dim: int, dtype: str, backward: bool) -> dict[str, Any]:
    return {
        "mask": mask, "q_len": q_len, "kv_len": kv_len, "heads": HEADS, "kv_heads": kv_heads, "dim": dim, "dtype": dtype,
        "backward": backward,
    }  # fmt: skip


def _named_by_a_goal(cell: dict[str, Any]) -> bool:
    if cell["mask"] == "decode" or "batch" in cell:
        return True
    long = any(_long(cell, mask) for mask in ("causal", "window")) and cell["kv_heads"] == 2
    return long or (not cell["backward"] and cell["mask"] == "full" and cell["dim"] == 128 and cell["q_len"] == 2048)


def _long(cell: dict[str, Any], mask: str) -> bool:
    """A forward pass at 8192 with a mask."""
    return not cell["backward"] and cell["q_len"] == 8192 and cell["mask"] == mask


def describe(cell: dict[str, Any]) -> str:
    """`causal 2048 kv 8 D 64 float32 fwd+bwd`."""
    direction = "fwd+bwd" if cell["backward"] else "fwd"
    if "batch" in cell:
        return (
            f"{cell['mask']} {cell['batch']} x {cell['kv_len']} kv {cell['kv_heads']} D {cell['dim']} {cell['dtype']}"
        )
    return f"{cell['mask']} {cell['kv_len']} kv {cell['kv_heads']} D {cell['dim']} {cell['dtype']} {direction}"


def _cache_bytes(cell: dict[str, Any]) -> int:
    """Keys and values."""
    width = 4 if cell["dtype"] == "float32" else 2
    return 2 * cell.get("batch", 1) * cell["kv_len"] * cell["kv_heads"] * cell["dim"] * width


def _too_large(rival: str, cell: dict[str, Any]) -> str | None:
    if rival != "attnops" and rival not in (OF_A_BATCH if "batch" in cell else RIVALS[:-1]):
        return "not run here"
    if rival == "jax.nn" and _cache_bytes(cell) >= 4 << 30:
        return "copies the cache, which doesn't fit beside the others'"
    logits = HEADS * cell["q_len"] * cell["kv_len"] * 4
    needs = logits * (4 if cell["backward"] else 2)
    if rival in WHOLE_LOGITS and needs > MOST_BYTES:
        return f"about {needs / 2**30:.0f} GiB of logits"
    return None


def measure(cell: dict[str, Any], workers: dict[str, Worker]) -> dict[str, Any]:
    """Run one cell: for each implementation median seconds and temp bytes, or why there are none."""
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[float]] = {}
    limit = math.inf
    too_large = {rival: reason for rival in workers if (reason := _too_large(rival, cell))}
    answers: dict[str, dict[str, Any]] = {rival: {"error": reason} for rival, reason in too_large.items()}
    asked = {rival: worker for rival, worker in workers.items() if rival not in too_large}
    if (
        _cache_bytes(cell) > 1 << 30
    ):  # one after another, as each takes several times the memory while it makes its tensors
        answers |= {rival: worker.ask(do="setup", rival=rival, cell=cell) for rival, worker in asked.items()}
    else:  # compile in parallel
        for rival, worker in asked.items():
            worker.send(do="setup", rival=rival, cell=cell)
        answers |= {rival: worker.receive() for rival, worker in asked.items()}
    for rival, worker in workers.items():  # attnops is first
        answer = answers[rival]
        if "stopped" in answer:
            answer = {"error": f"not compiled in {SETUP_SECONDS:.0f} s"}
        if "error" not in answer:
            unhurried = rival in ("attnops", *TORCH)
            first = worker.ask(SETUP_SECONDS if unhurried else limit, do="first", rival=rival)
            if rival == "attnops" and "seconds" in first:
                slow = max(STOP_SECONDS, STOP_RATIO * first["seconds"])
                limit = GOAL_SECONDS if _named_by_a_goal(cell) else slow
            samples[rival] = first.pop("sample", [])
            answer |= first
        results[rival] = answer
    running = [rival for rival, result in results.items() if "seconds" in result]
    times: dict[str, list[float]] = {rival: [] for rival in running}
    if sum(results[rival]["seconds"] for rival in running) > CELL_SECONDS:
        # No time for several calls of all: the first one counts. Other work on the machine could then decide a close race,
        # so attnops and torch run three times in all.
        for rival in running:
            times[rival].append(results[rival]["seconds"])
        for rival in ("attnops", *TORCH) * 2:
            if rival in running:
                times[rival].append(workers[rival].ask(do="time", rival=rival)["seconds"])
        rounds = 1
    else:
        started, rounds = time.monotonic(), 0
        while rounds < MOST_ROUNDS and (time.monotonic() - started) * (rounds + 1) / max(1, rounds) < CELL_SECONDS:
            for rival in running:
                times[rival].append(workers[rival].ask(do="time", rival=rival)["seconds"])
            rounds += 1
    for rival in running:
        results[rival]["seconds"] = statistics.median(times[rival])
        results[rival]["agrees"] = _agree(samples.get("attnops"), samples[rival], cell["dtype"])
    for worker in workers.values():
        worker.ask(do="clear")
    return {"cell": cell, "rounds": rounds, "results": results}


def _agree(ours: list[float] | None, theirs: list[float], dtype: str) -> bool:
    tolerance = 1e-3 if dtype == "float32" else 0.1
    return ours is not None and all(
        abs(a - b) <= tolerance * max(1.0, abs(a)) for a, b in zip(ours, theirs, strict=True)
    )


def flops(cell: dict[str, Any]) -> float:
    """Operations of a full forward pass."""
    return 4.0 * HEADS * cell["q_len"] * cell["kv_len"] * cell["dim"]


def ratio(row: dict[str, Any], rival: str) -> float | None:
    """Our time over another implementation's; an upper bound if that one was stopped, None if either has no time."""
    ours, theirs = row["results"]["attnops"], row["results"].get(rival, {})
    seconds = theirs.get("seconds", theirs.get("stopped"))
    return ours["seconds"] / seconds if seconds and "seconds" in ours else None


def share(row: dict[str, Any]) -> float:
    """A full forward pass's rate over that of a large matrix product in the same run."""
    cell = row["cell"]
    return flops(cell) / row["results"]["attnops"]["seconds"] / (row["product GFLOP/s"][cell["dtype"]] * 1e9)


def table(rows: list[dict[str, Any]]) -> str:
    """One line per cell: our time, each ratio (ours / theirs), temp memory, share of the product rate."""
    head = f"{'cell':<44}{'ms':>9}" + "".join(f"{r:>10}" for r in RIVALS) + f"{'MiB':>8}{'jax MiB':>9}{'peak':>6}"
    lines = [head]
    for row in sorted(
        rows, key=lambda r: (r["cell"]["backward"], r["cell"]["mask"], r["cell"]["kv_len"], describe(r["cell"]))
    ):
        cell, results = row["cell"], row["results"]
        ours = results["attnops"]
        if "seconds" not in ours:
            lines.append(f"{describe(cell):<44} {ours['error']}")
            continue
        line = f"{describe(cell):<44}{ours['seconds'] * 1e3:9.2f}"
        for rival in RIVALS:
            theirs, found = results.get(rival, {}), ratio(row, rival)
            text = "-" if found is None else f"{'<' if 'stopped' in theirs else ''}{found:.2f}"
            line += f"{text + ('' if theirs.get('agrees', True) else '!'):>10}"
        whole = results.get("jax.nn", {}).get("temp")
        line += f"{ours['temp'] / 2**20:8.1f}" + (f"{whole / 2**20:9.0f}" if whole else f"{'-':>9}")
        if cell["mask"] == "full" and not cell["backward"]:
            line += f"{share(row):6.0%}"
        lines.append(line)
    lines.append(
        "ratios are attnops / other: below 1 attnops is faster; < = the other was stopped; ! = its numbers differ from ours"
    )
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The goals: cells won against each implementation, geometric means, memory, product rate."""
    found: dict[str, Any] = {}
    for rival in RIVALS:
        ratios = [x for row in rows if (x := ratio(row, rival)) is not None]
        if ratios:
            found[rival] = {
                "cells": len(ratios),
                "faster in": sum(x < 1 for x in ratios),
                "geometric mean": round(math.exp(statistics.fmean(map(math.log, ratios))), 3),
                "worst": round(max(ratios), 2),
                "stopped in": sum("stopped" in row["results"].get(rival, {}) for row in rows),
            }
    for mask in ("causal", "window"):
        named = [row for row in rows if _long(row["cell"], mask) and "seconds" in row["results"].get("jax.nn", {})]
        if named:
            worst = max(x for row in named if (x := ratio(row, "jax.nn")) is not None)
            found[f"worst of jax.nn, {mask} forward, 8192"] = round(worst, 3)
    shares = [
        share(r) for r in rows if r["cell"]["mask"] == "full" and not r["cell"]["backward"] and r["cell"]["dim"] == 128
    ]
    if shares:
        found["share of the product rate, full forward, D 128"] = [round(min(shares), 2), round(max(shares), 2)]
    large = [
        r["results"]["attnops"]["temp"]
        for r in rows
        if r["cell"]["heads"] * r["cell"]["q_len"] * r["cell"]["kv_len"] * 4 >= 1 << 30
        and "temp" in r["results"]["attnops"]
    ]
    if large:
        found["most temp MiB where whole logits take a GiB or more"] = round(max(large) / 2**20, 1)
    return found


def means(rows: list[dict[str, Any]]) -> str:
    """Geometric means of the ratios by pass, mask and length, as a Markdown table; * where an implementation was stopped."""
    lines = [f"| Pass, mask | keys | cells | {' | '.join(RIVALS)} |", "|" + "---|" * (3 + len(RIVALS))]
    kinds = sorted({(r["cell"]["backward"], r["cell"]["mask"], r["cell"]["kv_len"]) for r in rows})
    for backward, mask, length in kinds:
        some = [
            r
            for r in rows
            if (r["cell"]["backward"], r["cell"]["mask"], r["cell"]["kv_len"]) == (backward, mask, length)
        ]
        line = f"| {'forward+backward' if backward else 'forward'}, {mask} | {length} | {len(some)} |"
        for rival in RIVALS:
            ratios = [x for row in some if (x := ratio(row, rival)) is not None]
            star = "*" if any("stopped" in row["results"].get(rival, {}) for row in some) else ""
            line += f" {math.exp(statistics.fmean(map(math.log, ratios))):.2f}{star} |" if ratios else " - |"
        lines.append(line)
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratios to each implementation over the length, one dot per cell, forward and forward+backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, style in (("", "default"), ("-dark", HERE.parent / "examples" / "dark.mplstyle")):
        with pyplot.style.context(style):
            figure = _figure(rows)
            figure.savefig(path.with_stem(path.stem + name), dpi=130)
            pyplot.close(figure)


def _figure(rows: list[dict[str, Any]]) -> Any:
    from matplotlib import pyplot as plt

    masks = {"full": "#4c72b0", "causal": "#dd8452", "window": "#55a868", "packed": "#c44e52", "decode": "#8172b3",
        "cache": "#937860", "ragged cache": "#da8bc3"}  # fmt: skip
    rivals = [rival for rival in RIVALS if any(ratio(row, rival) is not None for row in rows)]
    figure, axes = plt.subplots(1, len(rivals), figsize=(2.3 * len(rivals), 3.4), sharey=True, squeeze=False)
    for axis, rival in zip(axes[0], rivals, strict=True):
        for (mask, color), backward in itertools.product(masks.items(), (False, True)):
            some = [
                (r["cell"]["kv_len"] * (1.12 if backward else 0.9), x)
                for r in rows
                if r["cell"]["mask"] == mask
                and r["cell"]["backward"] == backward
                and (x := ratio(r, rival)) is not None
            ]
            if some:
                axis.scatter(
                    *zip(*some, strict=True),
                    s=14,
                    color=color,
                    marker="s" if backward else "o",
                    alpha=0.75,
                    linewidths=0,
                )
        axis.axhline(1, color=plt.rcParams["text.color"], linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=rival, xlabel="keys")
        axis.set_xticks([512, 2048, 8192, 32768], ["512", "2k", "8k", "32k"])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("time, attnops / other")
    axes[0][0].set_yticks([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"])
    handles = [plt.Line2D([], [], color=c, marker="o", linestyle="", label=m) for m, c in masks.items()]
    handles += [
        plt.Line2D([], [], color="grey", marker=m, linestyle="", label=t)
        for m, t in (("o", "forward"), ("s", "and backward"))
    ]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def machine() -> dict[str, Any]:
    """The processor's model, cores, Python."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"processor": model, "cores": os.cpu_count(), "python": platform.python_version()}


def show(found: dict[str, Any], picture: Path | None) -> None:
    """Print machine, cells and summary; draw the plot."""
    rows = found["rows"]
    print(json.dumps({key: found[key] for key in ("machine", "versions", "left out")}))
    print(table(rows))
    print(means(rows))
    print(json.dumps(summary(rows), indent=1))
    if found["not reached"]:
        print(f"{len(found['not reached'])} of the {len(cells())} cells are not measured")
    if picture:
        plot(rows, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="an implementation's own interpreter"
    )
    parser.add_argument("--only", default="", help="only cells whose description contains this")
    parser.add_argument("--again", action="store_true", help="with --resume: measure the cells of --only again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the cells in the JSON file, measure the others")
    parser.add_argument("--report", action="store_true", help="only print the JSON file's results")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.report:
        if not options.json:
            parser.error("--report requires --json FILE")
        show(json.loads(options.json.read_text()), options.plot)
        return
    own = dict(pair.split("=", 1) for pair in options.python)
    if options.resume and not (options.json and options.json.exists()):
        parser.error("--resume requires --json FILE with an earlier run's results")
    if unknown := sorted(set(own) - set(RIVALS)):
        parser.error(f"--python names {unknown}; the implementations are {', '.join(RIVALS)}")

    started = time.monotonic()
    workers = {rival: Worker(own.get(rival, sys.executable)) for rival in ("attnops", *RIVALS)}
    tiny = _cell("causal", 128, 128, 8, 64, "float32", False)
    missing = {r: a["error"] for r, w in workers.items() if "error" in (a := w.ask(do="setup", rival=r, cell=tiny))}
    for rival, why in missing.items():
        print(f"left out: {rival} ({why})")
    for rival in missing:
        workers.pop(rival).process.kill()
    if "attnops" not in workers:
        sys.exit("attnops can't be imported by this Python")

    size = 2048
    peak, versions = {}, {}
    for dtype in ("float32", "bfloat16"):
        answers = [workers["attnops"].ask(do="gemm", dtype=dtype, size=size) for _ in range(5)]
        peak[dtype] = round(2 * size**3 / statistics.median(a["seconds"] for a in answers) / 1e9)
    for worker in workers.values():
        versions = worker.ask(do="versions") | versions
    about = {"machine": machine(), "versions": versions, "left out": missing}

    rows: list[dict[str, Any]] = []
    if options.resume:
        before = json.loads(options.json.read_text())
        if differ := [key for key in about if before[key] != about[key]]:
            sys.exit(f"{options.json} was measured with another {' and '.join(differ)}: start again without --resume")
        rows = [row for row in before["rows"] if not (options.again and options.only in describe(row["cell"]))]
    done = [row["cell"] for row in rows]
    left = [cell for cell in cells() if cell not in done]
    todo = [cell for cell in left if options.only in describe(cell)]

    def whole() -> dict[str, Any]:
        return {**about, "summary": summary(rows), "rows": rows, "not reached": [describe(cell) for cell in left]}

    for cell in todo:
        if time.monotonic() - started > options.minutes * 60:
            break
        rows.append({**measure(cell, workers), "product GFLOP/s": peak})
        left.remove(cell)
        if options.json:
            options.json.write_text(json.dumps(whole(), indent=1))
        print(f"[{time.monotonic() - started:6.0f} s] {describe(cell)}", file=sys.stderr, flush=True)
    show(whole(), options.plot)


if __name__ == "__main__":
    main()
