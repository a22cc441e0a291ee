"""Seconds that the TPU compiler takes for a splash kernel: attnops', JAX's and tokamax's, on a machine without a TPU.

    python benchmarks/tpu_compile.py [--json FILE] [--target v6e:2x2 ...] [--report]

All three go through the same declaration and have the block sizes that a plan chooses for them; attnops' kernel is also compiled
with blocks of 1024 x 1024. A call has 8192 tokens, 8 heads with 2 KV heads, head dim 128, bfloat16. `forward` is one kernel, in
mode prefill; `both` is the forward kernel that keeps its log-sum-exp and the kernels of the backward pass.

A time is that of this process's CPUs, not of a clock on the wall: the compiler uses several threads, and other work beside it
then counts less. The kernels take turns; medians of several rounds. Tracing and lowering aren't in it. tokamax's kernel is left
out if tokamax isn't installed. Requires libtpu.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnops import Causal, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.verify.topology import described_mesh

TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
LENGTH, HEADS, KV_HEADS, DIM = 8192, 8, 2, 128
MASKS: dict[str, Mask] = {"full": Full(), "causal": Causal(0), "window": Causal(0) & SlidingWindow(1023, 0, offset=0)}
SMALL = "attnops, 1024 x 1024"
CONFIGS: dict[str, dict[str, Any]] = {
    "attnops": {},
    SMALL: dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), 1024),
    "jax": {"kernel": "jax"},
    "tokamax": {"kernel": "tokamax"},
}
ROUNDS = 3


def compiled_in(function: Callable[..., Any], arguments: list[jax.ShapeDtypeStruct]) -> float:
    """CPU seconds of one compilation."""
    jax.clear_caches()
    lowered = jax.jit(function).lower(*arguments)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


def measure(target: str, kernels: list[str]) -> list[dict[str, Any]]:
    """A row for each mask and pass of a target."""
    mesh = Mesh(described_mesh(target).devices.reshape(-1)[:1], ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct((1, LENGTH, heads, DIM), jnp.bfloat16, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    rows = []
    for name, mask in MASKS.items():
        passes: dict[tuple[str, str], Callable[..., Any]] = {}
        for kernel in kernels:
            configs = {"splash": CONFIGS[kernel]}
            metadata = OperationMetadata(mesh=mesh, operation_configs=configs, fallback="error", tuning="off")
            attend = OperationRegistry.create("splash", metadata)

            def forward(*x: Any, attend: Any = attend, mask: Mask = mask, mode: str = "prefill") -> Any:
                return attend(*x, mask=mask, mode=mode).attention_outputs

            def loss(*x: Any, forward: Any = forward) -> Any:
                return forward(*x, mode="train").astype(jnp.float32).sum()

            passes[kernel, "forward"], passes[kernel, "both"] = forward, jax.grad(loss, (0, 1, 2))
        times: dict[tuple[str, str], list[float]] = {which: [] for which in passes}
        for _, which in itertools.product(range(ROUNDS), passes):
            times[which].append(compiled_in(passes[which], arguments))
        for part in ("forward", "both"):
            seconds = {kernel: round(statistics.median(times[kernel, part]), 2) for kernel in kernels}
            rows.append({"target": target, "mask": name, "pass": part, "seconds": seconds})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    kernels = [kernel for kernel in CONFIGS if kernel in rows[0]["seconds"]]
    print("CPU seconds in the compiler")
    print(f"{'target':12} {'mask':7} {'pass':8}" + "".join(f"{kernel:>22}" for kernel in kernels))
    for row in rows:
        cells = "".join(f"{row['seconds'][kernel]:>22.2f}" for kernel in kernels)
        print(f"{row['target']:12} {row['mask']:7} {row['pass']:8}{cells}")
    for kernel in kernels[1:]:
        ratio = statistics.geometric_mean(row["seconds"]["attnops"] / row["seconds"][kernel] for row in rows)
        print(f"attnops of {kernel}: {ratio:.2f} as geometric mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the measurements, or with --report read them")
    parser.add_argument("--target", action="append", help="a described TPU; v5e, v6e and tpu7x by default")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.report:
        data = json.loads(options.json.read_text())
    else:
        kernels = [kernel for kernel in CONFIGS if kernel != "tokamax" or importlib.util.find_spec("tokamax")]
        data = {"rows": [row for target in options.target or TARGETS for row in measure(target, kernels)]}
        if options.json:
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    show(data["rows"])


if __name__ == "__main__":
    main()
