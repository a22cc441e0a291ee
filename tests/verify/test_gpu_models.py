"""The attention shapes of real models at their real lengths, forward and gradient, through the compiler for four GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import Causal, Chunked, Full, Mask, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.devices import gpu_specs
from attnops.verify.call import verify_call
from attnops.verify.gpu.gpu_mesh import described_gpus, has_cuda_plugin

if not has_cuda_plugin():
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)
pytestmark = pytest.mark.slow

SHAPES = json.loads((Path(__file__).parents[1] / "data" / "model_shapes.json").read_text())["shapes"]


def _mask(shape: dict[str, Any]) -> Mask:
    mask: Mask = Causal() if shape["causal"] else Full()
    if shape["window"]:
        mask = mask & SlidingWindow(*shape["window"])
    return mask & Chunked(shape["chunk"]) if shape["chunk"] else mask


@pytest.mark.parametrize("gpu", list(gpu_specs()))
@pytest.mark.parametrize("shape", SHAPES, ids=[s["name"].replace(" ", "_") for s in SHAPES])
def test_compiles_or_says_why_not(gpu: str, shape: dict[str, Any]) -> None:
    metadata = OperationMetadata(mesh=described_gpus(gpu), fallback="error", tuning="off")
    attend = OperationRegistry.create("flash_attn2", metadata)
    decodes = shape["seq_q"] == 1
    arguments: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((2, shape[length], shape[heads], shape[dim]), jnp.bfloat16)
        for name, length, heads, dim in (
            ("query", "seq_q", "hq", "head_dim"),
            ("key", "seq_kv", "hkv", "head_dim"),
            ("value", "seq_kv", "hkv", "head_dim_v"),
        )
    }
    arguments |= {
        "mask": _mask(shape),
        "softmax_scale": shape["softmax_scale"],
        "logits_soft_cap": shape["logits_soft_cap"],
        "mode": "autoregressive" if decodes else "train",
    }
    if shape["sinks"]:
        arguments["softmax_aux"] = jax.ShapeDtypeStruct((shape["hq"],), jnp.float32)
    if shape["bias"]:
        arguments["bias"] = jax.ShapeDtypeStruct((1, *shape["bias"][1:]), jnp.bfloat16)
    plan = attend.plan(**arguments)
    if max(shape["head_dim"], shape["head_dim_v"]) > 256:
        assert [reason.code for reason in plan.rejected[0].reasons] == ["flash.head_dim"]
        return
    assert plan.implementation == "flash_attn2.forward_cuda"
    report = verify_call(attend, arguments, gpu)
    assert report.passed, [one.failure for one in report.passes]
    kernels = [kernel for one in report.passes for kernel in one.kernels or ()]
    wanted = {"attnops_flash_forward"} | (set() if decodes else {"attnops_flash_dkv", "attnops_flash_dq"})
    assert {kernel.name for kernel in kernels} == wanted
