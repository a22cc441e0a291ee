"""Compiles every model's shape for one GPU, and prints a line of JSON for each: python gpu_models_compiled.py h100."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.verify.call import verify_call
from attnops.verify.gpu.gpu_kernels import GpuKernelUse
from attnops.verify.gpu.gpu_mesh import described_gpus

SHAPES = json.loads((Path(__file__).parents[1] / "data" / "model_shapes.json").read_text())["shapes"]


def _mask(shape: dict[str, Any]) -> Mask:
    mask: Mask = Causal() if shape["causal"] else Full()
    if shape["window"]:
        mask = mask & SlidingWindow(*shape["window"])
    return mask & Chunked(shape["chunk"]) if shape["chunk"] else mask


def _arguments(shape: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((2, shape[length], shape[heads], shape[dim]), jnp.bfloat16)
        for name, length, heads, dim in (
            ("query", "seq_q", "hq", "head_dim"),
            ("key", "seq_kv", "hkv", "head_dim"),
            ("value", "seq_kv", "hkv", "head_dim_v"),
        )
    }
    if shape["sinks"]:
        arguments["softmax_aux"] = jax.ShapeDtypeStruct((shape["hq"],), jnp.float32)
    if shape["bias"]:
        arguments["bias"] = jax.ShapeDtypeStruct((1, *shape["bias"][1:]), jnp.bfloat16)
    return arguments | {
        "mask": _mask(shape),
        "softmax_scale": shape["softmax_scale"],
        "logits_soft_cap": shape["logits_soft_cap"],
        "mode": "autoregressive" if shape["seq_q"] == 1 else "train",
    }


def _compiled(attend: Any, shape: dict[str, Any], gpu: str) -> dict[str, Any]:
    arguments = _arguments(shape)
    plan = attend.plan(**arguments)
    codes = sorted({reason.code for one in plan.rejected for reason in one.reasons})
    found: dict[str, Any] = {"shape": shape["name"], "method": plan.method, "codes": codes}
    if plan.method == "forward_native":
        return found | {"failures": [], "kernels": []}
    passes = verify_call(attend, arguments, gpu).passes
    kernels = [kernel for one in passes for kernel in one.kernels or ()]
    assert all(isinstance(kernel, GpuKernelUse) for kernel in kernels)
    stacks = {kernel.name: kernel.stack_bytes for kernel in kernels}
    return found | {"failures": [one.failure for one in passes if one.failure], "kernels": dict(sorted(stacks.items()))}


def main(gpu: str) -> None:
    """Compile them one after another."""
    attend = OperationRegistry.create("flash_attn2", OperationMetadata(mesh=described_gpus(gpu), tuning="off"))
    for shape in SHAPES:
        print(json.dumps(_compiled(attend, shape, gpu)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
