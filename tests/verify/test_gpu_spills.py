"""No registers are spilled at head dims 64 and 128: forward on every GPU, backward from Hopper on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from attnops.devices import gpu_specs
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin

if not has_cuda_plugin() or importlib.util.find_spec("cramjam") is None:
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)

# In a process of its own: the other tests compile with few optimisations, and these decide what is spilled.
PROGRAM = """
import json, sys
import jax
from attnops import Causal, Full, OperationMetadata, OperationRegistry, SlidingWindow
from attnops.verify.call import verify_call
from attnops.verify.gpu.gpu_mesh import described_gpus

gpu, dim = sys.argv[1], int(sys.argv[2])
attend = OperationRegistry.create("flash_attn2", OperationMetadata(mesh=described_gpus(gpu), fallback="error", tuning="off"))
for name, mask in {"full": Full(), "causal": Causal(), "window": Causal() & SlidingWindow(1023)}.items():
    for kv_heads in (8, 2):
        q, k = (jax.ShapeDtypeStruct((2, 4096, heads, dim), "bfloat16") for heads in (8, kv_heads))
        report = verify_call(attend, {"query": q, "key": k, "value": k, "mask": mask, "mode": "train"}, gpu)
        assert report.passed, report.passes
        for kernel in {kernel.name: kernel for one in report.passes for kernel in one.kernels}.values():
            print(json.dumps([f"{name}, {kv_heads} kv heads", kernel.name, kernel.stack_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("gpu", list(gpu_specs()))
def test_spills(gpu: str, dim: int) -> None:
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, gpu, str(dim)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 3 * 2 * 3
    hopper = gpu_specs()[gpu].capability >= (9, 0)
    spilled = [one for one in found if one[2] and (one[1] == "attnops_flash_forward" or hopper)]
    assert not spilled
