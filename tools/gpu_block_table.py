"""Choose sizes of the GPU kernels for the shapes of real models on described GPUs, and ship those that are worth it.

    python tools/gpu_block_table.py --search FOLDER [--gpu a100 ...]   measure what FOLDER lacks, then write table and page
    python tools/gpu_block_table.py --write FOLDER                     only write operators/flash/shipped.json and the page

For each shape of tests/data/model_shapes.json with more than one query (bfloat16, mode train, one device) the first candidates
of both passes are compiled at the real length and compared by the stalls of their loops, as `attnops tune --target h100` does;
FOLDER keeps the measurements. A candidate becomes a row if it takes at least 1 % fewer stalls than the heuristic's sizes, in
a pass, and loads as many tiles ahead. H100 and H200 run the same code and are searched once. Nothing is run. Requires
attnops[cuda-compile,cuda-sass].
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from block_table import SHAPES, WORTH, mask_of
from jax.sharding import AbstractMesh

from attnops import OperationMetadata, OperationRegistry
from attnops.compat import abstract_device
from attnops.devices import gpu_specs
from attnops.operators.choices.shipped import table_key
from attnops.operators.flash.flash_candidates import FLASH_SHIPPED
from attnops.planning import Plan
from attnops.planning.tune_cache import ENVIRONMENT, Measured, load
from attnops.planning.tuning import tune_key
from attnops.verify.search import TuneReport
from attnops.verify.tune import tune_plan

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "block-choices.md"
BEGIN, END = (f"<!-- {word}: written by tools/gpu_block_table.py -->" for word in ("begin", "end"))
MOST = 3  # candidates per pass
BATCH = 8  # enough rows and heads to fill a GPU, so that no pass splits its keys
SAME_CODE = {"h200": "h100"}


def shapes() -> list[dict[str, Any]]:
    """One of those that have the same key."""
    found: dict[str, dict[str, Any]] = {}
    for shape in SHAPES:
        if shape["seq_q"] > 1:
            decided = planned(shape, "h100")
            found.setdefault(table_key(decided.problem, decided.placement), shape)
    return list(found.values())


def planned(shape: dict[str, Any], gpu: str, **declared: Any) -> Plan:
    """The plan of a shape on one GPU of a kind."""
    kind = gpu_specs()[gpu].kind
    mesh = AbstractMesh((1,), ("fsdp",), abstract_device=abstract_device(kind, 1, "gpu"))

    def tensor(length: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((BATCH, length, heads, dim), jnp.bfloat16)

    arguments: dict[str, Any] = {
        "query": tensor(shape["seq_q"], shape["hq"], shape["head_dim"]),
        "key": tensor(shape["seq_kv"], shape["hkv"], shape["head_dim"]),
        "value": tensor(shape["seq_kv"], shape["hkv"], shape["head_dim_v"]),
        "mask": mask_of(shape),
        "softmax_scale": shape["softmax_scale"],
        "logits_soft_cap": shape["logits_soft_cap"],
    }
    if shape["sinks"]:
        arguments["softmax_aux"] = jax.ShapeDtypeStruct((shape["hq"],), jnp.float32)
    if shape["bias"]:
        arguments["bias"] = jax.ShapeDtypeStruct((1, *shape["bias"][1:]), jnp.bfloat16)
    made = OperationMetadata(mesh=mesh, fallback="error", tuning="off").replace(**declared)
    return OperationRegistry.create("flash_attn2", made).plan(**arguments)


def row_of(report: TuneReport) -> dict[str, Any]:
    """{'fields', 'ratio'} of the passes in which a candidate is better than the heuristic's sizes."""
    fields: dict[str, Any] = {}
    ratio: dict[str, float] = {}
    for part in report.candidates:
        own = report.heuristic(part)
        works = [one for one in report.measured(part) if one.seconds is not None and not _fewer_stages(one, own)]
        if not works:
            continue
        best = min(works, key=lambda one: one.detail["cycles"])
        share = _of_own(own, best)
        if share is None or share <= WORTH:
            fields |= {name: value for name, value in best.fields.items() if name != "kv_splits"}
            ratio |= {} if share is None else {part: round(share, 4)}
    return {"fields": fields, "ratio": ratio} if fields else {}


def _fewer_stages(one: Measured, own: Measured) -> bool:
    """Whether a kernel loads fewer tiles ahead than the heuristic's: waits for loads aren't in the stalls."""
    return any(one.fields[name] < stages for name, stages in own.fields.items() if name.startswith("num_stages"))


def _of_own(own: Measured, best: Measured) -> float | None:
    """The share of the heuristic's stalls; None if its sizes don't compile. They count although they spill."""
    return best.detail["cycles"] / own.detail["cycles"] if "cycles" in own.detail else None


def search(gpus: list[str], measure: bool) -> dict[str, dict[str, Any]]:
    """GPU -> key -> row; empty where the heuristic's sizes are as good. Without `measure`, only of what has been measured."""
    found: dict[str, dict[str, Any]] = {gpu: {} for gpu in gpus}
    for gpu in gpus:
        for shape in shapes():
            decided = planned(shape, SAME_CODE.get(gpu, gpu))
            if decided.method is None:
                continue
            if not measure and load(tune_key(decided.method, decided.problem, decided.placement)).choice is None:
                continue
            report = tune_plan(decided, how="static", most=MOST)
            if measure:
                print(gpu, shape["name"], row_of(report), flush=True)
            here = planned(shape, gpu)
            found[gpu][table_key(here.problem, here.placement)] = row_of(report) | {"shape": shape["name"]}
    return found


def write(found: dict[str, dict[str, Any]]) -> None:
    """The table that plans read, and its part of the page."""
    compiler = f"jax {metadata.version('jax')}, jax-cuda13-plugin {metadata.version('jax-cuda13-plugin')}"
    choices = {key: row["fields"] for rows in found.values() for key, row in rows.items() if "fields" in row}
    FLASH_SHIPPED.path.write_text(json.dumps({"compiler": compiler, "choices": choices}, indent=1) + "\n")
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n{page(found, compiler)}\n\n{END}{tail}", encoding="utf-8")


def page(found: dict[str, dict[str, Any]], compiler: str) -> str:
    """A table for each GPU."""
    parts = [f"Compiled with {compiler}."]
    for gpu, rows in found.items():
        better = {key: row for key, row in rows.items() if "fields" in row}
        told = (
            f"Of {len(rows)} calls, {len(rows) - len(better)} need no row: no other candidate takes 1 % fewer stalls."
        )
        parts += [f"### {gpu.upper()}", told]
        if better:
            lines = ["| Call | Sizes | Of the heuristic's stalls |", "|---|---|---|"]
            for key, row in better.items():
                call = key.partition(", ")[2].removeprefix("bfloat16, ")
                sizes = ", ".join(f"`{name}` {value}" for name, value in row["fields"].items())
                ratio = ", ".join(f"{part} {value:.2f}" for part, value in row["ratio"].items())
                lines.append(f"| {row['shape']}: {call} | {sizes} | {ratio} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=Path, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--gpu", action="append", choices=tuple(gpu_specs()))
    options = parser.parse_args()
    if (options.search is None) == (options.write is None):
        parser.error("one of --search and --write is required")
    os.environ[ENVIRONMENT] = str((options.search or options.write).absolute())
    if options.search is not None:
        search(options.gpu or [gpu for gpu in gpu_specs() if gpu not in SAME_CODE], measure=True)
    write(search(list(gpu_specs()), measure=False))


if __name__ == "__main__":
    main()
