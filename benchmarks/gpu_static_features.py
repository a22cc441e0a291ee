"""attnops' GPU kernels with more than a mask, in Mosaic GPU beside those in Triton, compiled without a GPU.

    python benchmarks/gpu_static_features.py --json FILE [--target b200] [--only TEXT]   (jax 0.12)
    python benchmarks/gpu_static_features.py --json FILE --report

An environment with attnops[cuda-compile,cuda-sass]. Few queries, keys of 8 bits a number, numbers by distance, latents whose
values are the first numbers of their keys, and dropout, forward, and the gradient of latents; bfloat16. Of each call: the stalls
of all loops over tiles, warps that correct sums or widen keys among them, per logit that the mask leaves, as `gpu_static.py`
counts them and in the same file; registers and bytes of stack of the kernel. JAX's and tokamax's kernels do none of these.
Nothing here was timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from attnops import T5, Causal, OperationMetadata, OperationRegistry, RelativeBias
from attnops.operators.call.key_columns import KeyColumns
from attnops.verify.call import verify_call
from attnops.verify.gpu_clock import gpu_cost
from attnops.verify.targets import target_of

KINDS = {"attnops mosaic": "mosaic", "attnops": "triton"}
MASK = Causal()
LONG, FEW = (4096, 4096), (4, 8192)


def _arrays(lengths: tuple[int, int], heads: tuple[int, int], dim: int, stored: str = "bfloat16") -> dict[str, Any]:
    """A causal call whose queries are the last tokens; stored: the dtype of keys and values."""
    q_len, kv_len = lengths
    key = jax.ShapeDtypeStruct((2, kv_len, heads[1], dim), stored)
    call = {"query": jax.ShapeDtypeStruct((2, q_len, heads[0], dim), "bfloat16"), "key": key, "value": key}
    if key.dtype.itemsize == 1:
        scale = jax.ShapeDtypeStruct((*key.shape[:3], 1), "float32")
        call |= {"key_scale": scale, "value_scale": scale}
    return call


def _latents(q_len: int, heads: int) -> dict[str, Any]:
    query, key = (jax.ShapeDtypeStruct((2, n, h, 576), "bfloat16") for n, h in ((q_len, heads), (8192, 1)))
    return {"query": query, "key": key, "value": KeyColumns(512), "softmax_scale": 0.1}


def calls() -> dict[str, dict[str, Any]]:
    """By name."""
    table = {"score": RelativeBias(buckets=T5()), "table": jax.ShapeDtypeStruct((32, 16), "float32")}
    dropped = {"dropout_prob": 0.1, "deterministic": False, "dropout_rng": jax.ShapeDtypeStruct((2,), "uint32")}
    made: dict[str, dict[str, Any]] = {}
    for dim in (64, 128):
        long = _arrays(LONG, (16, 16), dim)
        made |= {
            f"{dim} few": _arrays(FEW, (32, 8), dim),
            f"{dim} int8": _arrays(LONG, (16, 16), dim, "int8"),
            f"{dim} fp8": _arrays(LONG, (16, 16), dim, "float8_e4m3fn"),
            f"{dim} few int8": _arrays(FEW, (32, 8), dim, "int8"),
            f"{dim} few fp8": _arrays(FEW, (32, 8), dim, "float8_e4m3fn"),
            f"{dim} distance": long | table,
            f"{dim} dropout": long | dropped,
        }
    few, latents = _latents(1, 128), _latents(1024, 16)
    return made | {"576 latents few": few, "576 latents": latents, "576 latents gradient": latents | {"mode": "train"}}


def measure(target: str, call: dict[str, Any], kind: str) -> dict[str, Any]:
    """Compile, and read the loops."""
    configs = {"flash_attn2": {"kernel": kind}}
    metadata = OperationMetadata(
        mesh=target_of(target).mesh({"fsdp": 1}), fallback="error", tuning="off", runtime_dtype="bfloat16",
        operation_configs=configs,
    )  # fmt: skip
    q_len, kv_len = (call[name].shape[1] for name in ("query", "key"))
    arguments = {"mask": MASK, "mode": "prefill", "query_offset": kv_len - q_len} | call
    attend = OperationRegistry.create("flash_attn2", metadata)
    report = verify_call(attend, arguments, target)
    plan, backward = report.plan, arguments["mode"] == "train"
    one = report.passes[backward]
    if one.failure is not None or plan is None:
        raise RuntimeError(str(one.failure))
    sizes = plan.runs.passes(plan.config, backward)
    cost = gpu_cost(plan.problem, plan.placement, plan.config, sizes, one.kernels)
    rows = np.arange(q_len)[:, None] + kv_len - q_len
    live = int(MASK.test(rows, rows, np.arange(kv_len)[None]).sum()) * call["query"].shape[2] * call["query"].shape[0]
    names = [size.kernel for size in sizes]
    used = [
        {"kernel": k.name, "registers": k.registers, "stack": k.stack_bytes} for k in one.kernels if k.name in names
    ]
    return {"stalls": cost.stalls / live, "tile": [sizes[0].block_q, sizes[0].block_kv], "kernels": used}


def report(rows: dict[str, Any], target: str) -> None:
    """The rows of both kinds, and their ratio."""
    print(
        "| Call | Mosaic: stalls | registers, spills | Triton: stalls | registers, spills | ratio |\n|---|---|---|---|---|---|"
    )
    for name in (f"{target} forward features {call}" for call in calls()):
        found = [rows.get(f"{name} {who}", {}) for who in KINDS]
        cells = []
        for row in found:
            kernel = row["kernels"][0] if "kernels" in row else None
            cells += [f"{row['stalls']:.3f}", f"{kernel['registers']}, {kernel['stack']} B"] if kernel else ["-", "-"]
        both = all("stalls" in row for row in found)
        cells.append(f"{found[0]['stalls'] / found[1]['stalls']:.2f}" if both else "-")
        print(f"| {name.rpartition(' features ')[2]} | {' | '.join(cells)} |")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--target", default="b200")
    parser.add_argument("--only", default="")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    data = json.loads(options.json.read_text()) if options.json.exists() else {"rows": {}}
    if options.report:
        report(data["rows"], options.target)
        return
    data["versions"] = {"jax": jax.__version__}
    for call, arguments in calls().items():
        for who, kind in KINDS.items():
            name = f"{options.target} forward features {call} {who}"
            if name in data["rows"] or options.only not in name:
                continue
            try:
                data["rows"][name] = measure(options.target, arguments, kind)
            except Exception as error:  # including the compiler's own
                data["rows"][name] = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            print(name, data["rows"][name], file=sys.stderr, flush=True)
            options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
