"""The results of benchmarks/parallel.py as tables, for the terminal and for a page."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OURS = ("gather", "ring", "zigzag", "ulysses", "ulysses_ring")
RIVALS = ("jit sequence", "jit heads", "ejkernel", "ejkernel window")
DEVICES, WINDOW = 8, 1024
TOPOLOGY = "v5e:2x4"
_PAIRS = [(ours, rival) for ours in OURS for rival in RIVALS]
_PAIRS += [
    ("zigzag", "ring"),
    ("ring", "gather"),
    ("zigzag", "gather"),
    ("ulysses", "gather"),
    ("ulysses_ring", "gather"),
]


def describe(cell: dict[str, Any]) -> str:
    """`causal 8192 8/8 D 64 float32 fwd+bwd`."""
    direction = "fwd+bwd" if cell["backward"] else "fwd"
    heads = f"{cell['heads']}/{cell['kv_heads']}"
    return f"{cell['mask']} {cell['length']} {heads} D {cell['dim']} {cell['dtype']} {direction}"


def pairs(cell: dict[str, Any]) -> int:
    """Pairs of a query and a visible key, for one head."""
    length = cell["length"]
    if cell["mask"] == "full":
        return length**2
    window = WINDOW if cell["mask"] == "window" else length
    return sum(min(i + 1, window) for i in range(length))


def ratio(row: dict[str, Any], ours: str, rival: str, what: str = "seconds") -> float | None:
    """Ours over theirs; an upper bound if theirs was stopped, None if either has no number."""
    mine, theirs = row["results"].get(ours, {}), row["results"].get(rival, {})
    other = theirs.get(what, theirs.get("stopped") if what == "seconds" else None)
    return mine[what] / other if other and mine.get(what) else None


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each strategy against each other implementation, and some strategies against each other: cells, faster in, means, worst."""
    found = []
    for ours, rival in _PAIRS:
        ratios = [x for row in rows if (x := ratio(row, ours, rival)) is not None]
        temps = [x for row in rows if (x := ratio(row, ours, rival, "temp")) is not None]
        if ratios:
            mean, temp = (math.exp(statistics.fmean(map(math.log, some))) for some in (ratios, temps))
            found.append(
                {
                    "ours": ours,
                    "against": rival,
                    "cells": len(ratios),
                    "faster in": sum(x < 1 for x in ratios),
                    "time": round(mean, 3),
                    "worst": round(max(ratios), 2),
                    "temp": round(temp, 3),
                    "stopped in": sum("stopped" in row["results"].get(rival, {}) for row in rows),
                }
            )
    return found


def _value(found: dict[str, Any], what: str) -> str:
    """ms, or MiB."""
    if what != "seconds":
        return "-" if found.get(what) is None else f"{found[what] / 2**20:.1f}"
    if found.get("wrong"):
        return "wrong"
    return (
        f"{found[what] * 1e3:.0f}" if what in found else f">{found['stopped'] * 1e3:.0f}" if "stopped" in found else "-"
    )


def _reasons(rows: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(implementation, why it has no time) -> the last such cell."""
    found = {}
    for row in rows:
        for name, one in row["results"].items():
            wrong = f"wrong: errors {one['errors']}" if one.get("wrong") else None
            if reason := one.get("error") or one.get("left out") or wrong:
                found[name, reason] = describe(row["cell"])
    return found


def _cells(rows: list[dict[str, Any]], what: str) -> Iterator[list[str]]:
    """The header, then one line per cell, one column per implementation."""
    names = [name for name in (*OURS, *RIVALS) if any(name in row["results"] for row in rows)]
    yield ["cell", *names]
    for row in rows:
        yield [describe(row["cell"]), *(_value(row["results"].get(name, {}), what) for name in names)]


def _ratios(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["", "cells", "faster in", "time", "worst", "temp", "stopped in"]
    for one in summary(rows):
        numbers = (f"{one[key]:.2f}" for key in ("time", "worst", "temp"))
        yield [
            f"{one['ours']} / {one['against']}",
            str(one["cells"]),
            str(one["faster in"]),
            *numbers,
            str(one["stopped in"]),
        ]


def _balance(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["cell", "pass", "", "hops", "done / needed", "busiest / mean", "lockstep / mean", "GFLOP of each device"]
    for row in rows:
        head = [describe(row["cell"]).rsplit(" ", 1)[0], row["pass"], row["name"]]
        if "error" in row:
            yield [*head, "-", "-", "-", "-", row["error"]]
            continue
        numbers = (f"{row[f'{key}']:.3f}" for key in ("done over needed", "busiest over mean", "lockstep over mean"))
        yield [*head, str(len(row["hops"])), *numbers, " ".join(f"{n / 1e9:.2f}" for n in row["operations"])]


def _described(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["cell", "", "temp", "sent", "of it overlapped"]
    for row in rows:
        numbers = (
            [_value(row, what) for what in ("temp", "sent", "overlapped")] if "temp" in row else ["none", "-", "-"]
        )
        yield [describe(row["cell"]), row["name"], *numbers]


def _failure(row: dict[str, Any]) -> str:
    return row.get("error", f"not compiled in {row.get('stopped', 0):.0f} s")


def _aligned(lines: Iterator[list[str]]) -> str:
    table = list(lines)
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    left = {0, 1, 2} if table[0][:2] == ["cell", "pass"] else {0, 1} if table[0][:2] == ["cell", ""] else {0}
    return "\n".join(
        "  ".join(x.ljust(n) if i in left else x.rjust(n) for i, (x, n) in enumerate(zip(line, widths, strict=True)))
        for line in table
    )


def _markdown(lines: Iterator[list[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rest])


def show(found: dict[str, Any]) -> None:
    """Print everything to the terminal."""
    rows, cores = found["rows"], found["machine"]["cores"]
    print(json.dumps({key: found[key] for key in ("machine", "commit", "versions", "left out")}))
    print(f"\n{DEVICES} virtual devices on {cores} cores: ms (medians), the sum of the devices' work over the cores")
    print(_aligned(_cells(rows, "seconds")))
    print("> = stopped after; wrong = its numbers differ from the float64 reference; - = reason below")
    print("\nTemporary memory per device, MiB")
    print(_aligned(_cells(rows, "temp")))
    print("\nSent per device, MiB")
    print(_aligned(_cells(rows, "sent")))
    print("\nRatios, geometric means; below 1 the first is faster, or takes less temporary memory")
    print(_aligned(_ratios(rows)))
    print("\nWhy there is no time (the last such cell)")
    for (name, reason), cell in _reasons(rows).items():
        print(f"{name}, {cell}: {reason}")
    print(
        "\nBalance: operations of the matrix products that each device runs; lockstep = each hop's busiest device, summed"
    )
    print(_aligned(_balance(found["balance"])))
    print(f"\nCompiled for a described TPU {TOPOLOGY}, not run: MiB per device, in HBM (XLA keeps some in VMEM)")
    print(_aligned(_described(found["described"])))
    for name, reason in {(row["name"], _failure(row)) for row in found["described"] if "temp" not in row}:
        print(f"{name}: {reason}")
    if "tokamax" in found:
        print(f"\ntokamax's ring in the interpreter, {describe(found['tokamax']['cell'])}: {found['tokamax']}")


def fill(page: Path, found: dict[str, Any]) -> None:
    """Put the tables where the page has `<!-- parallel: NAME -->` and, after the old one, `<!-- end -->`."""
    rows = found["rows"]
    tables = {
        "seconds": _cells(rows, "seconds"),
        "temp": _cells(rows, "temp"),
        "sent": _cells(rows, "sent"),
        "ratios": _ratios(rows),
        "balance": _balance(found["balance"]),
        "described": _described(found["described"]),
    }
    text = page.read_text()
    for name, lines in tables.items():
        begin, end = f"<!-- parallel: {name} -->\n", "<!-- end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{_markdown(lines)}\n\n{end}{rest.split(end, 1)[1]}"
    page.write_text(text)
