"""How long attnops' kernels take to lower and compile for described GPUs: those in Mosaic GPU beside those in Triton.

    python benchmarks/gpu_compile_times.py --json FILE --target h100 [--dims 64,128] [--rounds 3]
    python benchmarks/gpu_compile_times.py --json FILE --report

Each round lowers and compiles every case of both kinds in turn, each pass with a scale of its own, so that no cache has seen it.
Times are seconds of the processor, all threads and children together, which a busy machine changes less than the clock's;
medians over rounds. Mosaic GPU compiles for one generation in a process: run it once for each target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from attnops import Causal, OperationMetadata, OperationRegistry
from attnops.verify.gpu.gpu_mesh import described_gpus

KINDS, PASSES = ("mosaic", "triton"), ("forward", "backward")
BATCH, LENGTH, HEADS = 2, 4096, 16
MOST = 1.5  # of Triton's times


def measure(target: str, kind: str, dim: int, part: str, number: int) -> dict[str, float]:
    """Seconds to lower (from Python to what the compiler is given) and to compile. The backward pass holds the forward one."""
    mesh = described_gpus(target)
    here = NamedSharding(mesh, PartitionSpec())
    configs = {"flash_attn2": {"kernel": kind}}
    metadata = OperationMetadata(mesh=mesh, fallback="error", tuning="off", operation_configs=configs)
    attend = OperationRegistry.create("flash_attn2", metadata)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, dim), jnp.bfloat16, sharding=here)
    scale = dim**-0.5 * (1 + 0.001 * (2 * number + PASSES.index(part)))
    mode = "train" if part == "backward" else "prefill"

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, mask=Causal(), mode=mode, softmax_scale=scale).attention_outputs

    def loss(*arguments: Any) -> Any:
        return run(*arguments).astype(jnp.float32).sum()

    function = run if part == "forward" else jax.grad(loss, (0, 1, 2))
    start = _seconds()
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        lowered = jax.jit(function, out_shardings=here).trace(x, x, x).lower(lowering_platforms=("cuda",))
    between = _seconds()
    lowered.compile()
    return {"lower": between - start, "compile": _seconds() - between}


def _seconds() -> float:
    return sum(os.times()[:4])


def report(rows: dict[str, Any]) -> None:
    """Medians of both kinds, and their ratio; those above MOST are marked."""
    print("| Case | lower: mosaic | triton | ratio | compile: mosaic | triton | ratio | together |")
    print("|---|---|---|---|---|---|---|---|")
    for case, kinds in rows.items():
        cells, sums = [], dict.fromkeys(KINDS, 0.0)
        for step in ("lower", "compile"):
            middle = {kind: statistics.median(one[step] for one in kinds[kind]) for kind in KINDS}
            cells += [f"{middle[kind]:.2f}" for kind in KINDS] + [_ratio(middle)]
            sums = {kind: sums[kind] + middle[kind] for kind in KINDS}
        print(f"| {case} | {' | '.join(cells)} | {_ratio(sums)} |")


def _ratio(seconds: dict[str, float]) -> str:
    ratio = seconds["mosaic"] / seconds["triton"]
    return f"{ratio:.2f}{'!' if ratio > MOST else ''}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    data = json.loads(options.json.read_text()) if options.json.exists() else {"rows": {}}
    if options.report:
        report(data["rows"])
        return
    dims = [int(dim) for dim in options.dims.split(",")]
    measure(options.target, "triton", dims[0], "forward", -1)  # what is imported and started once
    measure(options.target, "mosaic", dims[0], "forward", -1)
    for number in range(options.rounds):
        for dim in dims:
            for part in PASSES:
                row = data["rows"].setdefault(f"{options.target} {dim} {part}", {kind: [] for kind in KINDS})
                for kind in KINDS:
                    row[kind].append(measure(options.target, kind, dim, part, number))
        data["versions"] = {"jax": jax.__version__}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
