"""attnops' kernels over pages against JAX's paged_attention in Pallas' Triton, compiled without a GPU.

    python benchmarks/gpu_pages_static.py --json FILE [--target b200] [--only TEXT]   (jax 0.12, attnops[cuda-compile,cuda-sass])
    python benchmarks/gpu_pages_static.py --json FILE --report

Decoding steps of served models' layers, pages of 16 tokens (latents: 64), 32 sequences of up to 8192 tokens, for a described
H100, or a B200: Mosaic GPU compiles for one of them in a process. For the loop over keys of each kernel it sums the cycles that
a warp waits by the compiler's own schedule, times the warps that share a scheduler, and divides them by the cycles that the bytes
of the loop's keys and values take a multiprocessor at the published bandwidth: below 1, the loop is bound by memory as far as its
instructions tell. Waits for memory and for the tensor cores' results aren't in the sums, and nothing here was timed.
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
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from attnops.devices import gpu_specs
from attnops.operators.kernels.pages.mosaic.attend import paged_attention_mosaic
from attnops.operators.kernels.pages.mosaic.page_sizes import BLACKWELL_SIZING, HOPPER_SIZING
from attnops.operators.kernels.pages.mosaic.page_tiles import StepShape
from attnops.page_layouts import LAYOUTS, ArraySize
from attnops.verify.devices import lowered_for, tracing_on
from attnops.verify.gpu.gpu_kernels import gpu_kernels
from attnops.verify.gpu.gpu_mesh import described_gpus

SEQUENCES, PAGES, LENGTH = 32, 16384, 8192
SIZINGS = {sizing.target: sizing for sizing in (HOPPER_SIZING, BLACKWELL_SIZING)}
SCHEDULERS = 4  # of a multiprocessor
# Query heads, kv heads, dims of a key and of a value, tokens of a page.
MODELS = {
    "llama-3-8b": (32, 8, 128, 128, 16),
    "llama-3-70b, one of 8 devices": (8, 1, 128, 128, 16),
    "llama-3.2-1b": (32, 8, 64, 64, 16),
    "qwen-2.5-7b": (28, 4, 128, 128, 16),
    "gemma-2-9b": (16, 8, 256, 256, 16),
    "gpt-oss-20b": (64, 8, 64, 64, 16),
    "deepseek-v3": (128, 1, 576, 512, 64),
}
BLOCK_PAGES, SPLITS = 8, 16  # JAX's defaults


def ours(model: str, target: str) -> tuple[Any, dict[str, Any], int, int]:
    """(function, arrays, keys of a tile, warps that compute)."""
    heads, kv_heads, dim, value_dim, page = MODELS[model]
    latent = value_dim != dim
    layout = LAYOUTS["latent" if latent else "heads"]
    shape = StepShape(SEQUENCES, heads, kv_heads, (dim, value_dim), page, latent)
    sizing = SIZINGS[target]
    if dim > sizing.most[0] or value_dim > sizing.most[1]:
        raise NotImplementedError("refused")
    step = sizing.step(shape, gpu_specs()[target].cores)
    stored = [layout.array_shape(ArraySize(PAGES, page, kv_heads, n, (dim, value_dim), 2)) for n in (dim, value_dim)]
    arrays = {
        "query": ((SEQUENCES, heads, dim), "bfloat16"),
        "key_pages": (stored[0], "bfloat16"),
        **({} if latent else {"value_pages": (stored[1], "bfloat16")}),
        "cu_q_lens": ((SEQUENCES + 1,), "int32"),
        "kv_lens": ((SEQUENCES,), "int32"),
        "page_table": ((SEQUENCES, LENGTH // page), "int32"),
        "num_seqs": ((1,), "int32"),
    }
    more: dict[str, Any] = {
        "layout": layout.name,
        "value_dim": value_dim,
        "softmax_scale": dim**-0.5,
        "max_q_len": 1,
        "step": step,
        "generation": sizing.generation,
    }
    more |= {"value_pages": None} if latent else {}
    return (lambda x: paged_attention_mosaic(**x, **more)[:2]), arrays, step.decode.block_kv, 4 * step.decode.consumers


def of_jax(model: str, target: str) -> tuple[Any, dict[str, Any], int, int]:
    """JAX's kernel: a program has 16 rows, and partitions of a row's keys are merged afterwards."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    del target
    heads, kv_heads, dim, value_dim, page = MODELS[model]
    if value_dim != dim:
        raise NotImplementedError("it has no values in keys")
    arrays = {
        "q": ((SEQUENCES, heads, dim), "bfloat16"),
        "k_pages": ((kv_heads, PAGES, page, dim), "bfloat16"),
        "v_pages": ((kv_heads, PAGES, page, dim), "bfloat16"),
        "block_tables": ((SEQUENCES, LENGTH // page), "int32"),
        "lengths": ((SEQUENCES,), "int32"),
    }
    call = {"pages_per_compute_block": BLOCK_PAGES, "k_splits": SPLITS}
    return (lambda x: paged_attention(**x, **call)), arrays, BLOCK_PAGES * page, 8


def measured(model: str, who: str, target: str) -> dict[str, Any]:
    """Registers, spills, and the loop over keys."""
    spec, mesh = gpu_specs()[target], described_gpus(target)
    function, shapes, keys, warps = {"attnops": ours, "jax": of_jax}[who](model, target)
    sharding = NamedSharding(mesh, PartitionSpec())
    arrays = {name: jax.ShapeDtypeStruct(s, jnp.dtype(d), sharding=sharding) for name, (s, d) in shapes.items()}
    with tracing_on(mesh, "cuda"):
        lowered = lowered_for(jax.jit(function, out_shardings=sharding).trace(arrays), "cuda")
    compiled = lowered.compile()
    kernel, *_ = gpu_kernels(compiled, compiled.as_text(), spec)
    loop = (kernel.loops or ())[0].loop  # without a mask, where there are two
    # On Blackwell a warpgroup beside those of softmaxes corrects the sums.
    of_sums = kernel.sum_loops[0].stall_cycles if kernel.sum_loops else 0
    _, _, dim, value_dim, _ = MODELS[model]
    size = 2 * keys * (dim if value_dim != dim else dim + value_dim)
    of_memory = size / (spec.bytes_per_second / spec.cores / spec.clock)
    return {
        "registers": kernel.registers, "stack_bytes": kernel.stack_bytes, "threads": kernel.threads, "keys": keys,
        "instructions": loop.instructions, "stalls": loop.stall_cycles, "of_sums": of_sums,
        "of_memory": round((loop.stall_cycles * warps + 4 * of_sums) / SCHEDULERS / of_memory, 3),
    }  # fmt: skip


def report(data: dict[str, Any]) -> None:
    """The page's table."""
    print("| Layer | attnops | JAX | registers, spills (attnops) | the same (JAX) |\n|---|---|---|---|---|")
    for model in MODELS:
        rows = [data.get(f"{model} {who}", {}) for who in ("attnops", "jax")]
        ratios = [str(row.get("of_memory", row.get("failure", "-"))) for row in rows]
        use = [f"{row['registers']}, {row['stack_bytes']} B" if "registers" in row else "-" for row in rows]
        print(f"| {model} | {' | '.join([*ratios, *use])} |")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--target", choices=[*SIZINGS], default="h100")
    parser.add_argument("--only", default="")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    data: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.report:
        report(data)
        return
    for name, model, who in ((f"{m} {w}", m, w) for m in MODELS for w in ("attnops", "jax")):
        if name in data or options.only not in name:
            continue
        try:
            data[name] = measured(model, who, options.target)
        except Exception as error:  # the compiler's
            data[name] = {"failure": f"{type(error).__name__}: {str(error)[:120]}"}
        print(name, data[name], file=sys.stderr, flush=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
