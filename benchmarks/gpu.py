"""attnops' kernels on a GPU against jax.nn, JAX's kernels in Pallas, tokamax and torch, timed on the GPU of this machine.

    python benchmarks/gpu.py --json FILE [--only TEXT] [--rounds N]
    python benchmarks/gpu.py --json FILE --report

`attnops` stands for the kernels in Triton, `attnops mosaic` for those in Mosaic GPU on the generations that have them.
Every rival of a cell is compiled first, on many threads. Then the rivals of a cell take turns; a row has the median time of a
call. `prefill` cells are causal, windowed, packed or full attention over 4,096 tokens, forward or with all gradients; `decode`
cells are one query against a cache, timed in chains of CHAIN calls, each of which reads the one before. Half precision except
where a name says float32. The error is the largest difference from float32 attention by XLA, over its largest number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np

from attnops import Causal, Full, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.devices import gpu_variant
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

LENGTH, CHAIN, WINDOW = 4096, 8, 1024
DOCUMENTS = (1000, 531, 747, 290, 873, 117, 401, 137)
IDS = np.repeat(np.arange(len(DOCUMENTS), dtype=np.int32), DOCUMENTS)
MASKS = {"full": Full(), "causal": Causal(), "window": Causal() & SlidingWindow(WINDOW - 1), "packed": Causal()}
# (batch, query heads, kv heads, head dim)
SHAPES = {
    "D64": (2, 16, 16, 64),
    "D128": (2, 16, 16, 128),
    "D128 gqa": (2, 32, 8, 128),
    "D256": (2, 8, 8, 256),
}
# (batch, keys, query heads, kv heads, head dim)
DECODE = {
    "1x32k": (1, 32768, 32, 8, 128),
    "8x8k": (8, 8192, 32, 8, 128),
    "64x4k": (64, 4096, 32, 8, 128),
    "8x8k, 8 heads": (8, 8192, 8, 2, 128),
}

Run = Callable[..., Any]


def cells() -> dict[str, dict[str, Any]]:
    """What is timed, by name."""
    made = {}
    for shape in SHAPES:
        for mask in MASKS:
            for part in ("forward", "gradient"):
                if shape in ("D64", "D256") and mask in ("window", "packed"):
                    continue
                made[f"{shape} {mask} {part}"] = {"shape": shape, "mask": mask, "part": part}
    made |= {f"decode {name}": {"decode": name} for name in DECODE}
    return made


def generation() -> str | None:
    """The architecture of this machine's GPU, if attnops has kernels in Mosaic GPU for it and this jax."""
    gpu = gpu_variant(jax.devices()[0].device_kind)
    known = gpu is not None and gpu.architecture in ("hopper", "blackwell") and jax.__version_info__ >= JAX_NEEDED
    return gpu.architecture if gpu is not None and known else None


def rivals(cell: dict[str, Any]) -> dict[str, Run]:
    """Functions of query, key and value [batch, length, heads, head_dim], by who wrote them."""
    mask, decode = cell.get("mask", "full"), "decode" in cell
    ids = jnp.asarray(np.tile(IDS, (2, 1))) if mask == "packed" else None

    def operation(name: str, method: str, config: dict[str, Any] | None = None) -> Run:
        configs = {} if config is None else {name: config}
        attend = OperationRegistry.create(
            name, OperationMetadata(fallback="error", tuning="off", operation_configs=configs)
        )

        def run(q: Any, k: Any, v: Any) -> Any:
            extra = {} if ids is None else {"q_segment_ids": ids, "kv_segment_ids": ids}
            made = attend.plan(q, k, v, mask=MASKS[mask], **extra)
            assert made.method == method, made
            return attend(q, k, v, mask=MASKS[mask], **extra).attention_outputs

        return run

    def jax_nn(implementation: str) -> Run:
        window = (WINDOW - 1, 0) if mask == "window" else None
        causal = mask != "full"

        def run(q: Any, k: Any, v: Any) -> Any:
            seen = None if ids is None else (ids[:, None, :, None] == ids[:, None, None, :])
            return jax.nn.dot_product_attention(
                q, k, v, mask=seen, is_causal=causal, local_window_size=window, implementation=implementation
            )

        return run

    def pallas(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention

        groups = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, groups, 2) if groups > 1 else x for x in (k, v))
        return attention.mha(q, k, v, ids, q.shape[-1] ** -0.5, mask != "full")

    def jax_mosaic(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        keys = 64 if q.shape[-1] == 256 else 128
        gradients = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
        config = attention_mgpu.TuningConfig(
            block_q=64, block_kv=keys, max_concurrent_steps=2, causal=mask != "full", **gradients
        )
        return attention_mgpu.attention(q * q.shape[-1] ** -0.5, k, v, config)

    def tokamax(implementation: str) -> Run:
        import tokamax as package

        window = (WINDOW - 1, 0) if mask == "window" else None

        def run(q: Any, k: Any, v: Any) -> Any:
            return package.dot_product_attention(
                q, k, v, is_causal=mask != "full", local_window_size=window, implementation=implementation
            )

        return run

    found = {
        "attnops": operation("flash_attn2", "forward_cuda", {"kernel": "triton"}),
        "attnops native": operation("vanilla", "forward_native"),
        "cudnn": jax_nn("cudnn"),
        "jax.nn xla": jax_nn("xla"),
    }
    if decode:  # by its other routes
        found |= {
            f"native {path}": operation("vanilla", "forward_native", {"path": path}) for path in ("plain", "decode")
        }
    if mask != "window" and not decode:
        found["jax pallas"] = pallas
    architecture = generation()
    if architecture is not None and not decode:
        found["attnops mosaic"] = operation("flash_attn2", f"forward_{architecture}", {"kernel": "mosaic"})
    # Its gradient has no causal mask.
    unmasked = mask == "full" or (mask == "causal" and cell.get("part") == "forward")
    if architecture == "hopper" and unmasked and not decode:
        found["jax mosaic"] = jax_mosaic
    if mask != "packed" and not decode:
        for one in ("triton", "mosaic"):
            try:
                found[f"tokamax {one}"] = tokamax(one)
            except ImportError as error:
                print("tokamax:", error, file=sys.stderr)
    return found


def arrays(cell: dict[str, Any]) -> list[Any]:
    """Query, key, value and the gradient of the output."""
    if "decode" in cell:
        batch, keys, heads, kv_heads, dim = DECODE[cell["decode"]]
        shapes = [(batch, 1, heads, dim), *[(batch, keys, kv_heads, dim)] * 2, (batch, 1, heads, dim)]
    else:
        batch, heads, kv_heads, dim = SHAPES[cell["shape"]]
        shapes = [(batch, LENGTH, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def program(run: Run, cell: dict[str, Any]) -> Run:
    """What is compiled: a chain of calls, a call, or a call with its gradients."""
    if "decode" in cell:

        def chained(q: Any, k: Any, v: Any, _: Any) -> Any:
            for _ in range(CHAIN):
                q = run(q, k, v).reshape(q.shape)
            return q

        return chained
    if cell["part"] == "forward":
        return lambda q, k, v, _: run(q, k, v)

    def gradient(q: Any, k: Any, v: Any, d: Any) -> Any:
        output, pull = jax.vjp(run, q, k, v)
        return output, pull(d)

    return gradient


def torch_rivals(cell: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """torch's own attention, where a mask is a flag of its."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    if cell.get("mask", "full") not in ("full", "causal"):
        return {}
    named = [torch.as_tensor(np.asarray(x, np.float32)).to("cuda", torch.bfloat16) for x in arrays(cell)]
    # [batch, heads, length, dim], contiguous: the layout that suits it.
    q, k, v, d = (x.transpose(1, 2).contiguous() for x in named)
    causal, backward = cell.get("mask") == "causal", cell.get("part") == "gradient"
    gqa = q.shape[1] != k.shape[1]
    for x in (q, k, v):
        x.requires_grad_(backward)

    def once(backend: Any) -> Callable[[], Any]:
        def run() -> Any:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
                if backward:
                    torch.autograd.grad(out, (q, k, v), d)
                return out

        if "decode" not in cell:
            return run
        graph = torch.cuda.CUDAGraph()  # launches from Python take longer than the kernels
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(CHAIN):
                run()
        return graph.replay

    made = {}
    for name, backend in (("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cudnn", SDPBackend.CUDNN_ATTENTION)):
        try:
            one = once(backend)
            one()
            torch.cuda.synchronize()
            made[name] = one
        except Exception as error:
            print(name, str(error)[:200], file=sys.stderr)
    return made


def compiled(item: tuple[dict[str, Any], Run]) -> Any:
    """The executable, or why there is none."""
    cell, run = item
    shaped = jax.eval_shape(lambda: arrays(cell))
    try:
        return jax.jit(program(run, cell)).lower(*shaped).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def measure(cell: dict[str, Any], programs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Median milliseconds of each; its error; the bytes that the program needs beside its arguments and results."""
    given = arrays(cell)
    row: dict[str, Any] = {"failed": {n: p for n, p in programs.items() if isinstance(p, str)}}
    ready: dict[str, Callable[[], Any]] = {}
    want = None
    for name in ("jax.nn xla", *programs):
        made = programs[name]
        if isinstance(made, str) or name in ready:
            continue
        try:
            out = jax.block_until_ready(made(*given))
        except Exception as error:
            row["failed"][name] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(out)]
        want = want or leaves
        row.setdefault("error", {})[name] = max(
            float(abs(a - b).max() / abs(b).max()) for a, b in zip(leaves, want, strict=True)
        )
        row.setdefault("temporary", {})[name] = made.memory_analysis().temp_size_in_bytes
        ready[name] = lambda made=made: made(*given)
    others = torch_rivals(cell)
    times: dict[str, list[float]] = {name: [] for name in (*ready, *others)}
    for turn in range(rounds + 1):
        for name in times:
            if name in ready:
                count = 5
                start = time.perf_counter()
                for _ in range(count):
                    out = ready[name]()
                jax.block_until_ready(out)
            else:
                import torch

                count = 5
                start = time.perf_counter()
                for _ in range(count):
                    others[name]()
                torch.cuda.synchronize()
            if turn:
                times[name].append((time.perf_counter() - start) / count * 1e3)
    calls = CHAIN if "decode" in cell else 1
    row["ms"] = {name: round(statistics.median(taken) / calls, 5) for name, taken in times.items()}
    return row


WHO = (
    "attnops mosaic",
    "cudnn",
    "jax pallas",
    "jax mosaic",
    "tokamax triton",
    "tokamax mosaic",
    "jax.nn xla",
    "torch flash",
    "torch cudnn",
)


def report(rows: dict[str, Any]) -> str:
    """A table: attnops' milliseconds, and their ratio to those of the others; what doesn't run."""
    lines = ["| Case | attnops, ms | " + " | ".join(WHO) + " |", "|---" * (len(WHO) + 2) + "|"]
    for name, row in rows.items():
        ours = row["ms"].get("attnops", float("nan"))
        ratios = [f"{ours / row['ms'][who]:.2f}" if who in row["ms"] else "-" for who in WHO]
        lines.append(f"| {name} | {ours:.3f} | " + " | ".join(ratios) + " |")
    failed = [f"- {name}, {who}: {why[:120]}" for name, row in rows.items() for who, why in row["failed"].items()]
    return "\n".join([*lines, *(["", *failed] if failed else [])])


def time_cells(wanted: dict[str, dict[str, Any]], rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each cell's name and row, after all were compiled."""
    work = {(n, who): (cell, run) for n, cell in wanted.items() for who, run in rivals(cell).items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = dict(zip(work, pool.map(compiled, work.values()), strict=True))
    for name, cell in wanted.items():
        yield name, measure(cell, {who: p for (n, who), p in programs.items() if n == name}, rounds)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    data = json.loads(options.json.read_text()) if options.json.exists() else {"rows": {}}
    if options.report:
        print(report(data["rows"]))
        return
    wanted = {n: c for n, c in cells().items() if options.only in n and n not in data["rows"]}
    data["versions"] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    for name, row in time_cells(wanted, options.rounds):
        data["rows"][name] = row
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(report(data["rows"]))


if __name__ == "__main__":
    main()
