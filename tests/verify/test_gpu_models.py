"""The attention shapes of real models at their real lengths, forward and gradient, through the compiler for four GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from attnops.devices import gpu_specs
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin

if not has_cuda_plugin() or importlib.util.find_spec("cramjam") is None:  # which reads what is spilled
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)
pytestmark = pytest.mark.slow

SHAPES = json.loads((Path(__file__).parents[1] / "data" / "model_shapes.json").read_text())["shapes"]
NO_SPILLS = 128  # the head dims up to which no register is spilled
GENERATIONS = {(9, 0): "hopper", (10, 0): "blackwell"}  # that have kernels in Mosaic GPU


@pytest.mark.parametrize("gpu", list(gpu_specs()))
def test_all_compile_or_say_why_not(gpu: str) -> None:
    """In a process of its own: Mosaic GPU compiles for one architecture in a process."""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name("gpu_models_compiled.py")), gpu]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one.pop("shape"): one for one in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == {shape["name"] for shape in SHAPES}
    generation = GENERATIONS.get(gpu_specs()[gpu].capability) if jax.__version_info__ >= JAX_NEEDED else None
    for shape in SHAPES:
        one = found[shape["name"]]
        if max(shape["head_dim"], shape["head_dim_v"]) > 256:
            assert "flash.head_dim" in one["codes"], (shape["name"], one)
            continue
        assert one["method"] == f"forward_{generation or 'cuda'}", (shape["name"], one)
        assert one["failures"] == [], (shape["name"], one)
        passes = ["forward"] if shape["seq_q"] == 1 else ["dkv", "dq", "forward"]
        assert list(one["kernels"]) == [f"attnops_{generation or 'flash'}_{name}" for name in passes], (
            shape["name"],
            one,
        )
        if generation and max(shape["head_dim"], shape["head_dim_v"]) <= NO_SPILLS:
            assert set(one["kernels"].values()) == {0}, (shape["name"], one)
