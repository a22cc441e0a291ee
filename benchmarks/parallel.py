"""A sequence split over eight devices: attnops and other implementations. Time, temporary memory, bytes sent, balance.

    python benchmarks/parallel.py [--python ejkernel=PATH] [--python tokamax=PATH] [--json FILE] [--only TEXT]
    python benchmarks/parallel.py --report --json FILE [--page benchmarks/sequence-parallel.md]

The devices are virtual: one machine's cores do the work of all eight. So a time here is the SUM of what the devices do, over
the cores, with every copy between them in memory; it is neither the time of the slowest device nor does it include a network. A
strategy that leaves seven devices idle while one works isn't penalised here. Figures without this flaw are given as well:

- Balance: the operations of the matrix products that each device runs, by hop, read from the compiled program and its run
(parallel_products.py). If devices wait for each other at each hop, the time is the sum of each hop's busiest device; that over
the mean device shows how much longer they take than with equal parts. A full mask is the control: 1, and all operations counted.
- Temporary memory of a device and the bytes that it sends, from the compiled program; the same from programs compiled for
  a described TPU v5e 2x4, which nobody runs.

Each implementation is checked against a float64 reference (output and gradients of one kv head, all positions) before it is
timed; a wrong one isn't timed. Implementations run in turns, one call each, and medians count. Other implementations are stopped
after three times our slowest strategy's time, and over five seconds: their time is then at least that, and the ratios upper
bounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from native import HERE, Worker, machine
from parallel_tables import OURS, RIVALS, TOPOLOGY, WINDOW, describe, fill, pairs, show, summary

from attnops.verify.collectives import collectives, sent_bytes

SCRIPT = "parallel_worker.py"
SECONDS, MOST_ROUNDS = 4.0, 7  # per implementation in a cell
STOP_RATIO, STOP_SECONDS = 3.0, 5.0
MOST_BYTES = 12 << 30  # of whole logits, on all devices
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}


def _cell(mask: str, length: int, dtype: str = "float32", dim: int = 64, heads: int = 8, **more: Any) -> dict[str, Any]:
    return {"mask": mask, "length": length, "heads": heads, "kv_heads": 8, "dim": dim, "dtype": dtype} | more


def cells() -> list[dict[str, Any]]:
    """Forward, and forward with backward."""
    both = [_cell(mask, 4096) for mask in ("full", "causal", "window")]
    both += [_cell("causal", 4096, "bfloat16", dim=128), _cell("window", 4096, "bfloat16", heads=16)]
    both += [_cell("causal", 8192)]
    forward = [_cell("full", 8192), _cell("window", 8192), _cell("causal", 8192, "bfloat16"), _cell("causal", 16384)]
    return [c | {"backward": b} for c in both for b in (False, True)] + [c | {"backward": False} for c in forward]


def left_out(name: str, cell: dict[str, Any]) -> str | None:
    """Why an implementation is left out of a cell."""
    logits = 4 * cell["heads"] * cell["length"] ** 2 * (5 if cell["backward"] else 2)
    if name.startswith("jit") and logits > MOST_BYTES:
        return f"about {logits / 2**30:.0f} GiB of whole logits"
    if name == "zigzag" and cell["mask"] != "causal":
        return "zigzag is for masks without hops that fall away" if cell["mask"] == "window" else "nothing to even out"
    if name == "ejkernel window" and not (cell["mask"] == "causal" and cell["backward"]):
        return "only where its own causal gradient is wrong"
    return None


# -- reference ---------------------------------------------------------------------------------------------------------


def reference(cell: dict[str, Any], path: Path) -> None:
    """Output and gradients of kv head 3 and its query heads in float64, all rows of all positions, block by block."""
    from parallel_worker import tensors

    group, at = cell["heads"] // cell["kv_heads"], 3
    heads = slice(at * group, (at + 1) * group)
    query, key, value, cotangent = (x[0].astype(np.float64) for x in tensors(cell))
    k, v = key[:, at], value[:, at]
    scale, length, size = cell["dim"] ** -0.5, cell["length"], 512
    output, d_query = (np.zeros((length, group, cell["dim"])) for _ in range(2))
    d_key, d_value = np.zeros_like(k), np.zeros_like(v)
    for start in range(0, length, size):
        rows = slice(start, start + size)
        distance = np.arange(length)[rows, None] - np.arange(length)[None]
        seen = np.ones_like(distance, bool) if cell["mask"] == "full" else distance >= 0
        seen &= distance < (WINDOW if cell["mask"] == "window" else length)
        for head in range(group):
            q, d_out = query[rows, heads][:, head], cotangent[rows, heads][:, head]
            logits = np.where(seen, q @ k.T * scale, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            output[rows, head] = weights @ v
            if cell["backward"]:
                d_value += weights.T @ d_out
                inner = (output[rows, head] * d_out).sum(axis=1, keepdims=True)
                d_logits = weights * (d_out @ v.T - inner) * scale
                d_query[rows, head] = d_logits @ k
                d_key += d_logits.T @ q
    np.savez(
        path, output=output, query=d_query, key=d_key[:, None], value=d_value[:, None],
        heads=(heads.start, heads.stop), kv_heads=(at, at + 1),
    )  # fmt: skip


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(cell: dict[str, Any], workers: dict[str, Worker], folder: Path) -> dict[str, Any]:
    """One cell: for each implementation median seconds, temp and sent bytes of a device, errors; or why there are none."""
    results: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    here = {name: worker for name, worker in workers.items() if left_out(name, cell) is None}
    for name, worker in here.items():  # compile in parallel
        worker.send(do="setup", name=name, cell=cell, text=str(folder / name))
    wanted = folder / "reference.npz"
    reference(cell, wanted)
    compiled = {name: worker.receive(300) for name, worker in here.items()}
    slowest = 0.0
    for name in workers:
        if name not in here:
            results[name] = {"left out": left_out(name, cell)}
            continue
        found = compiled[name]
        results[name] = found
        if "temp" not in found:
            found.setdefault("error", f"not compiled in {found.get('stopped', 0):.0f} s")
            continue
        found["sent"] = sent_bytes(collectives((folder / name).read_text()))
        limit = 300.0 if name in OURS else max(STOP_SECONDS, STOP_RATIO * slowest)
        first = here[name].ask(limit + 5, do="first", name=name, reference=str(wanted))  # 5 s for the comparison
        found |= first
        if "stopped" in first:
            found["stopped"] = limit
        if "errors" not in first:
            continue
        slowest = max(slowest, first["seconds"]) if name in OURS else slowest
        found["wrong"] = max(first["errors"]) > TOLERANCE[cell["dtype"]]
        if not found["wrong"]:
            times[name] = [found["seconds"]] if found["seconds"] > SECONDS else []
    for _ in range(MOST_ROUNDS):
        for name, taken in times.items():
            each = results[name]["seconds"]
            if len(taken) < (2 if name in OURS else 1) or sum(taken) + each < SECONDS:
                taken.append(here[name].ask(do="time", name=name)["seconds"])
    for name, taken in times.items():
        results[name] |= {"seconds": statistics.median(taken), "calls": len(taken)}
    for found in results.values():
        if found.get("wrong"):
            found.pop("seconds", None)
    for worker in here.values():
        worker.ask(do="clear")
    return {"cell": cell, "results": results}


def measure_balance(workers: dict[str, Worker]) -> list[dict[str, Any]]:
    """The products that each device runs; the control first."""
    control, short, long = (
        _cell(mask, n, backward=True) for mask, n in (("full", 4096), ("causal", 4096), ("causal", 8192))
    )
    ours = [name for name in workers if name in OURS]
    asked = [(cell, name) for cell, names in ((control, ours), (short, workers), (long, ours)) for name in names]
    rows = []
    for cell, name in asked:
        if left_out(name, cell) is None:
            found = workers[name].ask(300, do="balance", name=name, cell=cell)
            workers[name].ask(do="clear")
            print(f"balance {name} {describe(cell)}", file=sys.stderr, flush=True)
            for which in ("forward", "backward"):
                row = {"cell": cell, "name": name, "pass": which}
                if which in found:
                    needed = pairs(cell) * cell["heads"] * cell["dim"] * (4 if which == "forward" else 10)
                    row |= found[which] | {"done over needed": sum(found[which]["operations"]) / needed}
                else:
                    row["error"] = found.get("error", f"stopped after {found.get('stopped', 0):.0f} s")
                rows.append(row)
    return rows


def measure_described(workers: dict[str, Worker], folder: Path) -> list[dict[str, Any]]:
    """Programs compiled for TPUs that aren't here."""
    rows = []
    for backward in (False, True):
        cell = _cell("causal", 16384, "bfloat16", dim=128, heads=32, kv_heads=32, backward=backward)
        here = {name: worker for name, worker in workers.items() if name != "ejkernel window"}
        for name, worker in here.items():  # nothing here is timed
            worker.send(do="described", name=name, cell=cell, topology=TOPOLOGY, text=str(folder / name))
        for name, worker in here.items():
            found = worker.receive(400)
            row = {"cell": cell, "name": name, "topology": TOPOLOGY, **found}
            if "temp" in found:
                sent = collectives((folder / name).read_text())
                row |= {"sent": sent_bytes(sent), "overlapped": sent_bytes(tuple(c for c in sent if c.overlapped))}
            rows.append(row)
            print(f"{TOPOLOGY} {name}", file=sys.stderr, flush=True)
    return rows


def interpreted(worker: Worker, folder: Path) -> dict[str, Any]:
    """tokamax's ring in Pallas' interpreter: whether its numbers are right. Its time there has no meaning."""
    cell = _cell("causal", 1024, dim=128, backward=True)
    reference(cell, folder / "reference.npz")
    made = worker.ask(300, do="setup", name="tokamax", cell=cell)
    found = (
        made
        if "error" in made
        else worker.ask(300, do="first", name="tokamax", reference=str(folder / "reference.npz"))
    )
    worker.ask(do="clear")
    return {"cell": cell, **{key: found[key] for key in ("errors", "error", "stopped") if key in found}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="an implementation's own interpreter"
    )
    parser.add_argument("--only", default="", help="time only cells whose description contains this")
    parser.add_argument("--skip", action="append", default=[], choices=("time", "balance", "described"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="only print the JSON file's results")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = parser.parse_args()
    if options.report:
        if not options.json:
            parser.error("--report requires --json FILE")
        tell(json.loads(options.json.read_text()), options.page)
        return
    own = dict(pair.split("=", 1) for pair in options.python)
    if unknown := sorted(set(own) - {"ejkernel", "tokamax"}):
        parser.error(f"--python names {unknown}; ejkernel and tokamax can have their own")

    names = (*OURS, *RIVALS, "tokamax")
    workers = {name: Worker(own.get(name.split()[0], sys.executable), SCRIPT) for name in names}
    found: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "versions": {},
        "left out": {},
        "rows": [],
        "balance": [],
        "described": [],
    }
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        found["tokamax"] = interpreted(workers["tokamax"], folder)
        tiny = _cell("causal", 256, dim=16, backward=True)
        for name in names[:-1]:
            if "error" in (first := workers[name].ask(do="setup", name=name, cell=tiny)):
                found["left out"][name] = first["error"]
        if "error" in found["tokamax"]:
            found["left out"]["tokamax"] = found.pop("tokamax")["error"]
        else:
            found["left out"]["tokamax"] = (
                "not timed: its kernels are for TPUs; interpreted they only show their numbers"
            )
        for name, why in found["left out"].items():
            print(f"left out: {name} ({why})")
        timed = {name: workers[name] for name in names[:-1] if name not in found["left out"]}

        def save() -> None:
            if options.json:
                options.json.write_text(json.dumps(found | {"summary": summary(found["rows"])}, indent=1))

        started = time.monotonic()
        for cell in cells() if "time" not in options.skip else []:
            if options.only in describe(cell):
                found["rows"].append(measure(cell, timed, folder))
                save()
                print(f"[{time.monotonic() - started:6.0f} s] {describe(cell)}", file=sys.stderr, flush=True)
        if "balance" not in options.skip:
            found["balance"] = measure_balance(timed)
        if "described" not in options.skip:
            compiled = timed | ({"tokamax": workers["tokamax"]} if "tokamax" in found else {})
            found["described"] = measure_described(compiled, folder)
        for name, environment in (("gather", "attnops"), ("ejkernel", "ejkernel"), ("tokamax", "tokamax")):
            found["versions"][environment] = workers[name].ask(do="versions")
        save()
        print(f"[{time.monotonic() - started:6.0f} s] done", file=sys.stderr)
    for worker in workers.values():
        worker.process.kill()
    tell(found, options.page)


def commit() -> str | None:
    """The commit of the checkout that holds this file."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def tell(found: dict[str, Any], page: Path | None) -> None:
    show(found)
    if page:
        fill(page, found)


if __name__ == "__main__":
    main()
