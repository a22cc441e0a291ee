"""A pair of layers of a hybrid model on pods that aren't here, at a million tokens: what each sends and holds.

    python benchmarks/hybrid_pods.py [--only NAME ...] [--json FILE]
    python benchmarks/hybrid_pods.py --report --json FILE [--page benchmarks/pods.md]

The layers are declared in examples/pods: attention, the recurrence and its convolution, of a Qwen3.5-like and of a
Kimi-Linear-like model, on one mesh and in one order of tokens. A cell is `attnops verify FILE --target TARGET --mesh MESH`, in a
process of its own; nothing runs. What gathering would send is planned with sequence_parallel="gather", and not compiled. Requires
libtpu.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "pods"
MESHES = {"qwen3_5": "sp=32,tp=2", "kimi_linear": "sp=8,tp=4"}
TARGETS = {
    "qwen3_5": {"v5p": "v5p:4x4x4", "tpu7x": "tpu7x:4x4x2"},
    "kimi_linear": {"v5p": "v5p:2x4x4", "tpu7x": "tpu7x:2x2x4"},
}
LAYERS = ("attention", "recurrence", "convolution")
CELLS = [f"{model}/{layer}/{kind}" for model in MESHES for layer in LAYERS for kind in ("v5p", "tpu7x")]
CELL_SECONDS = 3600
_BEGIN, _END = "<!-- hybrid pods -->", "<!-- end of hybrid pods -->"


def gathering(name: str) -> tuple[float, float]:
    """What each device would have to send if the sequence were gathered: (forward, both passes)."""
    from attnops import Declaration
    from attnops.cli.verified import target_metadata
    from attnops.planning.recurrent.traffic import recurrence_traffic
    from attnops.planning.traffic import min_traffic
    from attnops.registry import OperationRegistry

    model, layer, kind = name.split("/")
    declaration = Declaration.load(EXAMPLES / model / f"{layer}.json")
    metadata = target_metadata(declaration, TARGETS[model][kind], MESHES[model])
    metadata = metadata.replace(sequence_parallel="gather", scan_ring_attention=None, strict=False)
    made: Any = OperationRegistry.create(declaration.operation, metadata)
    plan = made.plan(**declaration.call_arguments(declaration.shapes()))
    if layer == "attention":
        forward, both = (min_traffic(plan, backward).sent_bytes for backward in (False, True))
    else:
        forward, both = (
            recurrence_traffic(plan.operation, plan.problem, plan.placement, backward).sent_bytes
            for backward in (False, True)
        )
    return forward, both


def measure(name: str) -> dict[str, Any]:
    """The report of `attnops verify`, of each pass what is sent, what has to be, and the peak; and what gathering would send."""
    model, layer, kind = name.split("/")
    file = EXAMPLES / model / f"{layer}.json"
    target = ["--target", TARGETS[model][kind], "--mesh", MESHES[model], "--json"]
    command = [sys.executable, "-m", "attnops", "verify", str(file), *target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CELL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not compiled in {CELL_SECONDS} s"}
    try:
        return summary(json.loads(done.stdout)) | {"gathered_bytes": gathering(name)}
    except ValueError:
        return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1][:500]}


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a report."""
    (report,) = reports
    passes = {}
    for one in report["passes"]:
        sent: dict[str, float] = {}
        for each in one["collectives"] or ():
            sent[each["kind"]] = sent.get(each["kind"], 0.0) + each["sent_bytes"]
        passes[one["name"]] = {
            "failure": one["failure"],
            "sent_bytes": None if one["collectives"] is None else sent,
            "needed_bytes": sum(need["sent_bytes"] for need in one["needs"]),
            "differences": one["differences"],
            "peak_bytes": one["peak_bytes"],
        }
    return {"outcome": report["outcome"], "implementation": report["plan"]["implementation"], "passes": passes}


def _size(count: float) -> str:
    return f"{count / 2**20:.1f}" if count < 1000 * 2**20 else f"{count / 2**30:.1f}k"


def report(found: dict[str, Any]) -> str:
    """The table, in Markdown."""
    lines = [
        f"libtpu {found['libtpu']}, jax {found['jax']}. Of a device: MiB sent in the forward pass and in both, and what "
        "gathering would send; GiB at the peak of both passes; 1048576 tokens, bfloat16.",
        "",
        "| Layer | Target, mesh | Runs | Sent forward, both | Gathering | Peak | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (name for name in CELLS if name in found["cells"]):
        model, layer, kind = name.split("/")
        cell = found["cells"][name]
        row = [f"{model} {layer}", f"{TARGETS[model][kind]}, {MESHES[model]}"]
        lines.append(f"| {' | '.join([*row, *_columns(cell)])} |")
    return "\n".join(lines)


def _columns(cell: dict[str, Any]) -> list[str]:
    if "error" in cell:
        return ["", "", "", "", cell["error"]]
    passes = list(cell["passes"].values())
    if failed := next((one["failure"] for one in passes if one["failure"]), None):
        return [cell["implementation"] or "", "", "", "", failed["message"]]
    sent = ["unknown" if one["sent_bytes"] is None else _size(sum(one["sent_bytes"].values())) for one in passes]
    peak = f"{passes[-1]['peak_bytes'] / 2**30:.1f}"
    remark = "; ".join(line for one in passes for line in one["differences"]) or "as planned"
    gathered = ", ".join(map(_size, cell["gathered_bytes"]))
    return [
        cell["implementation"],
        ", ".join(sent),
        gathered,
        peak,
        remark if "unknown" not in sent else "its text can't be read",
    ]


def main() -> None:
    """Compile the requested cells, one after another, and print the table."""
    from compiled_cells import arguments, run_cells

    run_cells(arguments(__doc__).parse_args(), CELLS, measure, report, (_BEGIN, _END))


if __name__ == "__main__":
    main()
