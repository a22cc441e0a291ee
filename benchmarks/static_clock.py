"""The static clock against published measurements: tokamax's autotuning data for its splash kernels.

    python benchmarks/static_clock.py --python /path/to/python --json FILE    (an environment with tokamax and libtpu)
    python benchmarks/static_clock.py --json FILE --report

tokamax ships, for a list of shapes, the best block sizes found on a TPU and the times measured with them. Each of
these kernels is compiled with exactly that configuration for a described TPU, its cycles are read from the compiler's final
schedule (attnops.verify.static_clock), with no tile below what the matrix units need at their published peak, and the two are
compared. Only one measurement per shape is published: how the clock
ranks block sizes is judged by where the published best stands among other candidates.

Not in the cycles: waits for memory, the start of the pipeline, and XLA's work around the kernel (tokamax transposes query,
key, value and output there). The report tests what a term for these adds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnops import Causal, Full
from attnops.verify.generations import abstract_target
from attnops.verify.static_clock import TileCycles, kernels_in, regions, tile_cycles
from attnops.verify.tile_counts import matrix_cycles

WORKER = Path(__file__).parent / "tpu_static_worker.py"
# Folder of the data -> topology, HBM bytes per second of a core (as JAX's TPU table has them).
CHIPS = {
    "tpu7x": ("tpu7x:2x2x1", 7.40e12 / 2),
    "tpu_v6_lite": ("v6e:2x2", 1.64e12),
}
FILES = {"forward": "pallas_mosaic_tpu_flash_attention.json", "backward": "pallas_mosaic_tpu_flash_attention_vjp.json"}
OTHERS = [
    {
        "block_q": q, "block_kv": kv, "block_kv_compute": compute, "q_layout": 1, "k_layout": 2, "v_layout": 1,
        "use_experimental_scheduler": True, "use_base2_exp": True,
    }
    for q, kv, compute in itertools.product((1024, 2048), (1024, 2048), (256, 512, 1024))
]  # fmt: skip


def published(data: Path) -> list[dict[str, Any]]:
    """The shapes in bfloat16, causal or full, with a measurement."""
    found = []
    for chip, (which, file) in itertools.product(CHIPS, FILES.items()):
        entries = json.loads((data / chip / file).read_text() or "{}") if (data / chip / file).exists() else {}
        for text, measured in entries.items():
            call = json.loads(text)
            shapes = [call[name] for name in "qkv"]
            mask = call["mask"]
            plain = call["bias"] is None and call["dropout_mask"] is None and call["logits_soft_cap"] is None
            if not measured or not plain or mask["bool_mask"] is not None or call["return_residuals"]:
                continue
            if not all(shape.startswith("bf16[") for shape in shapes):
                continue
            ((config, times),) = measured.items()
            q, k, v = ([int(n) for n in shape[5:-1].split(",")] for shape in shapes)
            found.append(
                {
                    "chip": chip,
                    "pass": which,
                    "batch": q[0],
                    "length": q[1],
                    "heads": q[2],
                    "kv_heads": k[2],
                    "dim": q[3],
                    "value_dim": v[3],
                    "mask": "causal" if mask.get("causal_mask") else "full",
                    "config": json.loads(config),
                    "ms": float(np.median(times["evaluation_times_ms"])),
                }
            )
    return found


def blocks(config: dict[str, Any]) -> tuple[int, int]:
    """(block_q, block_kv) of either pass."""
    which = "_dkv" if "block_q_dkv" in config else ""
    return config[f"block_q{which}"], config[f"block_kv{which}"]


def case_of(row: dict[str, Any]) -> dict[str, Any]:
    """What is compiled: the schedule doesn't depend on batch, heads, or the number of blocks beyond two."""
    config = dict(row["config"])
    if row["pass"] == "backward":  # any forward pass will do
        side = min(512, row["length"])
        config |= {"block_q": side, "block_kv": side, "block_kv_compute": side}
    return {
        "kernel": "tokamax", "target": CHIPS[row["chip"]][0], "dim": row["dim"], "value_dim": row["value_dim"],
        "mask": row["mask"], "length": min(row["length"], 2 * max(blocks(row["config"]))), "config": config,
        "forward_only": row["pass"] == "forward",
    }  # fmt: skip


def compile_one(python: str, case: dict[str, Any]) -> list[Any] | str:
    """The kernel's TileCycles, or why there are none."""
    folder = tempfile.mkdtemp()
    try:
        hlo = f"splash_mha_{'fwd' if case['forward_only'] else 'dkv'}_no_residuals.1"
        command = [python, str(WORKER), json.dumps(case | {"out": folder, "hlo": hlo})]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no word"])[-1][:300]
        (dumps,) = kernels_in(Path(folder)).values()
        return list(tile_cycles(regions(*(path.read_text() for path in dumps))).cheapest_first())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(python: str, data: dict[str, Any], save: Any) -> None:
    """Compile what has no cycles yet."""
    known = {json.dumps(case_of(row)): row["cycles"] for row in data["rows"] + data["others"] if "cycles" in row}
    for row in data["rows"] + data["others"]:
        case = case_of(row)
        key = json.dumps(case)
        if key not in known:
            known[key] = compile_one(python, case)
            print(known[key], key, flush=True)
        row["cycles"] = known[key]
        save()


class Work(NamedTuple):
    """The cost of a call by each measure: cycles of a core, steps of the grid, bytes of HBM in the kernel and around it."""

    cycles: float
    steps: float
    kernel_bytes: float
    around_bytes: float


def work(row: dict[str, Any], cycles: list[Any]) -> Work:
    """The work of all heads."""
    block_q, block_kv = blocks(row["config"])
    mask = Causal(0) if row["mask"] == "causal" else Full()
    kinds = mask.live_blocks(block_q, block_kv, q_len=row["length"], kv_len=row["length"])
    full, masked = (int((kinds == kind).sum()) for kind in (2, 1))
    backward = row["pass"] == "backward"
    slow = row["length"] // (block_kv if backward else block_q)
    heads = row["batch"] * row["heads"]
    q, v = (-(-row[name] // 128) * 128 * 2 for name in ("dim", "value_dim"))  # bytes per row
    rows, kv_share = row["length"], row["kv_heads"] / row["heads"]
    if backward:  # by kv block: query, its gradient's part and that of the output every step
        inside = (full + masked) * block_q * (2 * q + v) + rows * 2 * (q + v)
        around = rows * 2 * (2 * q + 2 * v + 2 * kv_share * (q + v))
        around += (full + masked) * block_q * q + rows * q  # the parts of the query's gradient, summed
    else:
        inside = (full + masked) * block_kv * (q + v) + rows * (q + v)
        around = rows * 2 * (q + v + kv_share * (q + v))
    kind = abstract_target(CHIPS[row["chip"]][0])[0]
    least = matrix_cycles(kind, row["pass"], block_q, block_kv, row["dim"], row["value_dim"])
    tiles, *rest = cycles
    total = TileCycles(tuple(tiles), *rest).at_least([least] * 2).total([full, masked], slow)
    return Work(*(heads * n for n in (total, full + masked, inside, around)))


def spearman(a: Any, b: Any) -> float:
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


MODELS = {
    "cycles": lambda w, band: [w.cycles],
    "cycles + bytes around": lambda w, band: [w.cycles, w.around_bytes / band],
    "cycles + steps": lambda w, band: [w.cycles, w.steps],
    "cycles + kernel's bytes": lambda w, band: [w.cycles, w.kernel_bytes / band],
    "cycles + bytes around + steps": lambda w, band: [w.cycles, w.around_bytes / band, w.steps],
}


def report(data: dict[str, Any]) -> None:
    for chip, which in itertools.product(CHIPS, FILES):
        rows = [
            r for r in data["rows"] if (r["chip"], r["pass"]) == (chip, which) and isinstance(r.get("cycles"), list)
        ]
        if rows:
            _compare(chip, which, rows)
    _ranks(data)


def _compare(chip: str, which: str, rows: list[dict[str, Any]]) -> None:
    band = CHIPS[chip][1]
    works = [work(row, row["cycles"]) for row in rows]
    measured = np.array([row["ms"] for row in rows]) / 1e3
    hertz = float(np.median([w.cycles / t for w, t in zip(works, measured, strict=True)]))
    print(f"\n{chip}, {which}: {len(rows)} measurements, one constant: {hertz / 1e9:.2f} GHz")
    print(
        f"{'shape':24}{'dims':>9} {'mask':7}{'blocks':>16}{'cycles':>12}{'clock ms':>10}{'meas. ms':>10}{'error':>8}{'GHz':>7}"
    )
    for row, w, t in zip(rows, works, measured, strict=True):
        shape = "x".join(str(row[n]) for n in ("batch", "length", "heads")) + (
            f"/{row['kv_heads']}" if row["kv_heads"] != row["heads"] else ""
        )
        config = row["config"]
        sizes = "/".join(
            str(n) for n in (*blocks(config), config.get("block_kv_compute", config.get("block_kv_dkv_compute")))
        )
        predicted = w.cycles / hertz
        print(
            f"{shape:24}{row['dim']:>5}/{row['value_dim']:<3} {row['mask']:7}{sizes:>16}{w.cycles:>12.0f}"
            f"{predicted * 1e3:>10.3f}{t * 1e3:>10.3f}{predicted / t - 1:>8.0%}{w.cycles / t / 1e9:>7.2f}"
        )
    weights = np.array([row["batch"] * row["heads"] * row["length"] ** 2 for row in rows])
    for name, terms in MODELS.items():
        features = np.array([terms(w, band) for w in works])
        # least squares of the relative error
        factors, *_ = np.linalg.lstsq(features / measured[:, None], np.ones(len(rows)), rcond=None)
        predicted = features @ factors
        errors = np.abs(predicted / measured - 1)
        print(
            f"  {name:32} error {np.median(errors):4.0%} in the median, {errors.max():4.0%} at most; rank correlation"
            f" {spearman(predicted, measured):.3f}, of time per weight {spearman(predicted / weights, measured / weights):.3f};"
            f" {1e-9 / factors[0]:.2f} GHz" + "".join(f", {f:.3g}" for f in factors[1:])
        )


def _ranks(data: dict[str, Any]) -> None:
    """Where the published best stands among other block sizes, by the clock."""
    print("\nThe published best block sizes among the clock's ranking of other candidates:")
    others = [r for r in data["others"] if isinstance(r.get("cycles"), list)]
    for row in data["rows"]:
        same = [o for o in others if (o["chip"], o["pass"], o["dim"]) == (row["chip"], row["pass"], row["dim"])]
        same = [o for o in same if max(blocks(o["config"])) <= row["length"]]
        if len(same) < 4 or not isinstance(row.get("cycles"), list) or row["value_dim"] != row["dim"]:
            continue
        costs = sorted(work(row | {"config": o["config"]}, o["cycles"]).cycles for o in same)
        own = work(row, row["cycles"]).cycles
        print(
            f"{row['chip']} {row['length']:>6} {row['mask']:7} {blocks(row['config'])}: place"
            f" {1 + sum(cost < own * 0.9999 for cost in costs)} of {len(costs)}, {own / costs[0]:.3f} of the clock's best,"
            f" the worst is {costs[-1] / costs[0]:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an environment with tokamax and libtpu")
    parser.add_argument("--json", type=Path, required=True, help="measurements; those that it has aren't made again")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.report:
        report(json.loads(options.json.read_text()))
        return
    where = "import importlib.util as u, importlib.metadata as m; print(u.find_spec('tokamax').submodule_search_locations[0]);"
    where += "print(*(m.version(n) for n in ('tokamax', 'jax', 'libtpu')))"
    folder, versions = subprocess.run(
        [options.python, "-c", where], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    shape = {"batch": 1, "length": 4096, "heads": 1, "kv_heads": 1, "dim": 128, "value_dim": 128, "mask": "causal"}
    data = {
        "versions": dict(zip(("tokamax", "jax", "libtpu"), versions.split(), strict=True)),
        "rows": published(Path(folder) / "data" / "autotuning"),
        "others": [{"chip": "tpu7x", "pass": "forward", **shape, "config": config} for config in OTHERS],
    }
    if options.json.exists():
        old = json.loads(options.json.read_text())
        found = {json.dumps(case_of(row)): row["cycles"] for row in old["rows"] + old["others"] if "cycles" in row}
        for row in data["rows"] + data["others"]:
            if (key := json.dumps(case_of(row))) in found:
                row["cycles"] = found[key]
    measure(options.python, data, lambda: options.json.write_text(json.dumps(data, indent=1)))
    report(data)


if __name__ == "__main__":
    main()
