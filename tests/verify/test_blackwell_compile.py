"""The tests of kernels compiled for Blackwell, in a process of their own: Mosaic GPU compiles for one architecture in a process,
and other tests compile for Hopper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED
from attnops.verify.gpu.gpu_mesh import has_cuda_plugin

if not has_cuda_plugin():
    pytest.skip("pip install 'attnops[cuda-compile]'", allow_module_level=True)
if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: plans choose the kernel in Triton", allow_module_level=True)

FILES = ("blackwell_forward_compile.py", "blackwell_gradients_compile.py", "blackwell_pages_compile.py")


@pytest.mark.parametrize("cells", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES)
def test_compiled_for_blackwell(file: str, cells: str) -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-n0", "-m", cells, str(Path(__file__).with_name(file)))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
