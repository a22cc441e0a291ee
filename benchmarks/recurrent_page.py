"""Writes recurrent.md from results/recurrent.json, which recurrent.py and recurrent_cycles.py fill, without what that lacks.

python benchmarks/recurrent_page.py
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIB = 1 << 20


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]


def on_cpu(data: dict[str, Any]) -> Iterator[str]:
    """Times and memory."""
    yield "## On a CPU\n"
    yield (
        "`python benchmarks/recurrent.py --json benchmarks/results/recurrent.json --python PYTHON`, two cores, float32: 4096 "
        "tokens, 16 heads of 128. Below 1 attnops is faster."
    )
    if "load" in data:
        yield f"The machine's load before it was {data['load'][0]}."
    if scan := data.get("scan"):
        yield (
            f"\nA forward pass of the gated delta rule takes {scan['ratio']:.2f} of the time of a scan in jax, token by token. "
            "In chunks there are 1.7 times as many products; what a CPU gains is that they are products of matrices."
        )
        if "least" in scan:
            yield f"These products alone, at the rate that XLA makes them, take {scan['least']:.2f}."
        yield ""
    if found := data.get("rivals"):
        yield from rivals(found)
    if passes := data.get("passes"):
        rows = [
            [
                f"`{rule}`",
                f"{of['both/forward']:.1f}",
                " and ".join(f"{size / MIB:.0f}" for name, size in of.items() if name.startswith("temporary")) + " MiB",
            ]
            for rule, of in passes.items()
        ]
        head = [
            "Operation",
            "Forward and gradient, as a multiple of the forward pass",
            "Temporary memory of both, 4096 and 8192 tokens",
        ]
        yield from table(head, rows)
        if elsewhere := data.get("passes elsewhere"):
            yield f"These are of another machine, on which a forward pass takes {elsewhere:.2f} of the time.\n"
    if "decode" in data:
        yield (
            "One token of each sequence, as a multiple of reading and writing the states once, in place. A state is read, then "
            "read again and written: XLA makes a loop of each, over all states, as it gives a loop that writes a part of an "
            "array to one core. Steps over slots take a block of heads at a time, which a core's cache holds, and are compared "
            "with one core."
        )
        if bound := all("least" in of for of in data["decode"].values()):
            yield "The least is the time to read the states once, and then to read and write them."
        over = data.get("slots", {})
        rows = [
            [
                f"`{rule}`",
                f"{of['ratio']:.2f}",
                *([f"{of['least']:.2f}"] if bound else []),
                *(f"{over[key]['ratio']:.2f}" if (key := f"{rule} {n}") in over else "" for n in (16, 128)),
            ]
            for rule, of in data["decode"].items()
        ]
        least = ["Least in two passes"] if bound else []
        yield from table(["Operation", "16 sequences", *least, "16 of 32 slots", "128 of 256 slots"], rows)


def rivals(found: dict[str, Any]) -> Iterator[str]:
    """Other projects."""
    rows, missing = [], []
    for name, of in found.items():
        if name in ("mean", "slower"):
            continue
        if "missing" in of:
            missing.append(f"{name} ({of['missing']})")
            continue
        rows.append([f"`{of['rule']}`", name, of["version"], f"{of['ratio']:.2f}", f"{of['apart']:.0e}"])
    yield from table(["Operation", "Against", "Version", "Ratio of times", "Outputs apart"], rows)
    if rows:
        yield f"The geometric mean is {found['mean']:.2f}. attnops is slower than: {', '.join(found['slower']) or 'none'}."
    if missing:
        yield f"Not run: {'; '.join(missing)}."


def on_tpus(data: dict[str, Any]) -> Iterator[str]:
    """Static cycles."""
    yield "\n## On TPUs\n"
    yield (
        "`python benchmarks/recurrent_cycles.py`: static cycles of the kernels for 128 tokens of 4 heads of 128 in bfloat16, by "
        "the compiler's schedule. They leave out waits for memory. Nothing was run on a TPU."
    )
    rows = [
        [
            f"{device}, `{cell.split()[0]}`, {cell.split()[1]}",
            *(f"{of[kernel]:.0f}" for kernel in ("forward", "forward_keeping", "backward")),
        ]
        for device, cells in data["cycles"].items()
        for cell, of in cells.items()
    ]
    head = ["Device, rule, tokens of a chunk", "Forward", "Forward, keeping what the gradient needs", "Backward"]
    yield from table(head, rows)
    yield (
        "The delta rule's backward pass takes less than its forward pass, as the triangular inverse is kept. With a decay for "
        "each key channel, every level of halves of a chunk has products of its own, and each has two more in the backward pass."
    )
    if step := data.get("step"):
        said = ", ".join(f"{cycles:.0f} on {device}" for device, cycles in step.items())
        yield f"\nA token of 4 heads over slots takes {said}, with raw gates and norms."
    if drafts := data.get("drafts"):
        said = ", ".join(f"{cycles:.0f} on {device}" for device, cycles in drafts.items())
        yield f"Each of 4 tokens of a row takes {said}; its states stay in VMEM between them."
    if (one := data.get("convolved step")) and (several := data.get("convolved drafts")):
        pairs = (f"{cycles:.0f} and {several[device]:.0f} on {device}" for device, cycles in one.items())
        said = ", ".join(pairs)
        yield f"With convolutions of queries, keys and values it is {said}; XLA then has no work before it."
    if theirs := data.get("tokamax"):
        yield (
            "\ntokamax's `causal_conv1d_gated_delta_rule` has the convolution too. attnops leaves it to XLA in chunks and has it "
            "in the kernel of one token; ours as a part of it:"
        )
        rows = []
        for device, of in theirs.items():
            if "failure" in of:
                yield f"\nOn {device} it doesn't compile: {of['failure']}"
                continue
            cells = [f"{of[name]} ({of[f'ours/theirs {name}']:.2f})" for name in ("chunks", "step")]
            rows.append([f"{device}, {of['version']}", *cells])
        yield from table(["Device", "128 tokens of 4 heads", "One token of 4 heads"], rows)


def main() -> None:
    data = json.loads((HERE / "results" / "recurrent.json").read_text())
    lines = ["# Recurrent operations\n", *on_cpu(data), *on_tpus(data)]
    text = "\n".join(lines).replace("\n\n\n", "\n\n").strip()
    blocks = [x if x.startswith("|") else textwrap.fill(x, 127, break_on_hyphens=False) for x in text.split("\n\n")]
    (HERE / "recurrent.md").write_text("\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
