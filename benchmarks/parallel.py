"""A sequence split over eight devices: attnops' strategies and their rivals. Time, temporary memory, what is sent, balance.

    python benchmarks/parallel.py [--python ejkernel=PATH] [--python tokamax=PATH] [--json FILE] [--only TEXT]
    python benchmarks/parallel.py --report --json FILE

The devices are virtual: one machine's cores do the work of all eight. So a time here is the SUM of what the devices do, over
the cores, with every copy between them in memory; it isn't the time of the slowest device, nor has it a network in it. A
strategy that leaves seven devices idle while one works is not punished for it here. What is free of that is told beside it:

- Balance: the operations of the matrix products that each device runs, by hop, read from the compiled program and its run
  (parallel_products.py). Devices that wait for each other at each hop take the sum of each hop's busiest device; that over the
  mean device is how much longer they take than with equal parts. A full mask is the control: 1, and all operations counted.
- Temporary memory of a device and the bytes that it sends, from the compiled program; and the same from programs compiled for
  a described TPU v5e 2x4, which nobody runs.

Each implementation is held against a float64 reference (output and gradients of one kv head, all positions) before it is timed;
one that is wrong isn't timed. Implementations take turns, a call each, and medians count. A rival is stopped after three times
what our slowest strategy takes, and over five seconds: its time is then at least that, its ratios are at most those shown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from native import Worker, machine

from attnops.verify.collectives import collectives, sent_bytes

OURS = ("gather", "ring", "zigzag", "ulysses", "ulysses_ring")
RIVALS = ("jit sequence", "jit heads", "ejkernel", "ejkernel window")
SCRIPT = "parallel_worker.py"
DEVICES, WINDOW = 8, 1024
SECONDS, MOST_ROUNDS = 4.0, 7  # of an implementation in a cell
STOP_RATIO, STOP_SECONDS = 3.0, 5.0
MOST_BYTES = 12 << 30  # of whole logits, on all devices
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
TOPOLOGY = "v5e:2x4"


def _cell(mask: str, length: int, dtype: str = "float32", dim: int = 64, heads: int = 8, **more: Any) -> dict[str, Any]:
    return {"mask": mask, "length": length, "heads": heads, "kv_heads": 8, "dim": dim, "dtype": dtype} | more


def cells() -> list[dict[str, Any]]:
    """Forward, and forward with backward."""
    both = [_cell(mask, 4096) for mask in ("full", "causal", "window")]
    both += [_cell("causal", 4096, "bfloat16", dim=128), _cell("window", 4096, "bfloat16", heads=16)]
    both += [_cell("causal", 8192)]
    forward = [_cell("full", 8192), _cell("window", 8192), _cell("causal", 8192, "bfloat16"), _cell("causal", 16384)]
    return [c | {"backward": b} for c in both for b in (False, True)] + [c | {"backward": False} for c in forward]


def describe(cell: dict[str, Any]) -> str:
    """`causal 8192 8/8 D 64 float32 fwd+bwd`."""
    direction = "fwd+bwd" if cell["backward"] else "fwd"
    heads = f"{cell['heads']}/{cell['kv_heads']}"
    return f"{cell['mask']} {cell['length']} {heads} D {cell['dim']} {cell['dtype']} {direction}"


def left_out(name: str, cell: dict[str, Any]) -> str | None:
    """Why a cell isn't for an implementation."""
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
    for name, worker in here.items():  # compiling side by side
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


def pairs(cell: dict[str, Any]) -> int:
    """Of a query and a key that it sees, of one head."""
    length = cell["length"]
    if cell["mask"] == "full":
        return length**2
    window = WINDOW if cell["mask"] == "window" else length
    return sum(min(i + 1, window) for i in range(length))


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
    """tokamax's ring in Pallas' interpreter: whether its numbers are right. Its time there means nothing."""
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


# -- telling -----------------------------------------------------------------------------------------------------------


def ratio(row: dict[str, Any], ours: str, rival: str, what: str = "seconds") -> float | None:
    """Ours over theirs, an upper bound where the rival was stopped, None where one of them has no number."""
    mine, theirs = row["results"].get(ours, {}), row["results"].get(rival, {})
    other = theirs.get(what, theirs.get("stopped") if what == "seconds" else None)
    return mine[what] / other if other and mine.get(what) else None


def table(rows: list[dict[str, Any]], what: str) -> str:
    """A line a cell, a column an implementation: ms, or MiB of a device."""
    names = [name for name in (*OURS, *RIVALS) if any(name in row["results"] for row in rows)]
    lines = [f"{'cell':<42}" + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in names)]
    for row in rows:
        line = f"{describe(row['cell']):<42}"
        for name in names:
            found = row["results"].get(name, {})
            value = found.get(what)
            if what == "seconds":
                text = (
                    f"{value * 1e3:.0f}" if value else f">{found['stopped'] * 1e3:.0f}" if "stopped" in found else "-"
                )
                text = "wrong" if found.get("wrong") else text
            else:
                text = "-" if value is None else f"{value / 2**20:.1f}"
            line += f"{text:>{max(9, len(name) + 2)}}"
        lines.append(line)
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each strategy against each rival, and zigzag against the plain ring: cells, faster in, geometric means."""
    found = []
    for ours, rival in [(o, r) for o in OURS for r in RIVALS] + [
        ("zigzag", "ring"),
        ("ring", "gather"),
        ("ulysses", "gather"),
    ]:
        ratios = [x for row in rows if (x := ratio(row, ours, rival)) is not None]
        temps = [x for row in rows if (x := ratio(row, ours, rival, "temp")) is not None]
        if ratios:
            mean, temp = (math.exp(statistics.fmean(map(math.log, some))) for some in (ratios, temps))
            found.append(
                {"ours": ours, "against": rival, "cells": len(ratios), "faster in": sum(x < 1 for x in ratios),
                 "time": round(mean, 3), "worst": round(max(ratios), 2), "temp": round(temp, 3),
                 "stopped in": sum("stopped" in row["results"].get(rival, {}) for row in rows)}
            )  # fmt: skip
    return found


def show(found: dict[str, Any]) -> None:
    print(json.dumps({key: found[key] for key in ("machine", "versions", "left out")}))
    rows = found["rows"]
    print(
        f"\n{DEVICES} virtual devices on {found['machine']['cores']} cores: the sum of the devices' work, ms (medians)"
    )
    print(table(rows, "seconds"))
    print("> = stopped after; wrong = its numbers differ from the float64 reference; - = see 'why not'")
    print("\nTemporary memory of a device, MiB")
    print(table(rows, "temp"))
    print("\nSent by a device, MiB")
    print(table(rows, "sent"))
    print("\nRatios, geometric means; below 1 the first is faster, or takes less temporary memory")
    print(f"{'':32}{'cells':>6}{'faster in':>10}{'time':>8}{'worst':>8}{'temp':>8}{'stopped in':>11}")
    for one in summary(rows):
        head = f"{one['ours']} / {one['against']}"
        print(
            f"{head:32}{one['cells']:>6}{one['faster in']:>10}{one['time']:>8.2f}{one['worst']:>8.2f}{one['temp']:>8.2f}"
            f"{one['stopped in']:>11}"
        )
    reasons = {
        (name, reason): describe(row["cell"])
        for row in rows
        for name, one in row["results"].items()
        if (
            reason := one.get("error")
            or one.get("left out")
            or (f"wrong: errors {one['errors']}" if one.get("wrong") else None)
        )
    }
    print("\nWhy not (the last such cell)")
    for (name, reason), cell in reasons.items():
        print(f"{name:16} {cell}: {reason}")
    print(
        "\nBalance: operations of the matrix products that a device runs; 'lockstep' = the sum of each hop's busiest device"
    )
    print(
        f"{'cell':34}{'pass':10}{'':14}{'hops':>5}{'done/needed':>12}{'busiest/mean':>13}{'lockstep/mean':>14}  GFLOP a device"
    )
    for row in found["balance"]:
        head = f"{describe(row['cell'])[: -len(' fwd+bwd')]:34}{row['pass']:10}{row['name']:16}"
        if "error" in row:
            print(head, row["error"])
            continue
        each = " ".join(f"{n / 1e9:.2f}" for n in row["operations"])
        print(
            f"{head}{len(row['hops']):>3}{row['done over needed']:>12.3f}{row['busiest over mean']:>13.3f}"
            f"{row['lockstep over mean']:>14.3f}  {each}"
        )
    print(f"\nCompiled for a described TPU {TOPOLOGY}, not run: MiB of a device")
    for row in found["described"]:
        mib = {key: f"{row[key] / 2**20:.1f}" for key in ("temp", "sent", "overlapped") if key in row}
        numbers = (
            f"temp {mib['temp']:>8}  sent {mib['sent']:>7}  of it overlapped {mib['overlapped']:>7}"
            if mib
            else row.get("error", row)
        )
        print(f"{describe(row['cell']):42}{row['name']:16}{numbers}")
    if "tokamax" in found:
        print(f"\ntokamax's ring, interpreted, {describe(found['tokamax']['cell'])}: {found['tokamax']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="a rival's own interpreter")
    parser.add_argument("--only", default="", help="time only cells whose description contains this")
    parser.add_argument("--skip", action="append", default=[], choices=("time", "balance", "described"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="only print the JSON file's results")
    options = parser.parse_args()
    if options.report:
        if not options.json:
            parser.error("--report wants --json FILE")
        show(json.loads(options.json.read_text()))
        return
    own = dict(pair.split("=", 1) for pair in options.python)
    if unknown := sorted(set(own) - {"ejkernel", "tokamax"}):
        parser.error(f"--python names {unknown}; ejkernel and tokamax can have their own")

    names = (*OURS, *RIVALS, "tokamax")
    workers = {name: Worker(own.get(name.split()[0], sys.executable), SCRIPT) for name in names}
    found: dict[str, Any] = {
        "machine": machine(),
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
    show(found)


if __name__ == "__main__":
    main()
