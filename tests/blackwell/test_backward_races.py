"""Mistakes planted in the kernels of Blackwell's gradients are noticed by the interpreter's race detection, or by the numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from backward_mutations import KERNELS, mutations

# A race, a phase that nobody has waited for, or one that was missed.
NOTICED = ("RACE DETECTED", "Barrier completed phase", "must do so in all phases")
SECONDS, TIMES = 600, 2
PLANTED = [(kernel, name) for kernel, one in KERNELS.items() for name in mutations(one)]


def test_twenty_a_kernel() -> None:
    assert all(len(mutations(kernel)) > 20 for kernel in KERNELS.values())


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), PLANTED)
def test_a_mistake_is_noticed(kernel: str, name: str) -> None:
    program = Path(__file__).with_name("backward_mutations.py")
    command = [sys.executable, program, kernel, name]
    for _ in range(1 if name == "none" else TIMES):
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        unnoticed = run.returncode == 0 and run.stdout.split()[-1:] == ["unnoticed"]
        noticed = "numbers" in run.stdout or any(words in run.stderr for words in NOTICED)
        assert (unnoticed, noticed) == ((True, False) if name == "none" else (False, True)), run.stderr[-2000:]
