"""Mistakes planted in the Hopper kernel over pages are noticed by the interpreter's race detection, or by the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from hopper_pages_mutations import MUTATIONS

NOTICED = ("RACE DETECTED", "Barrier completed phase")  # a race, or a phase that nobody has waited for
SECONDS = 600


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str) -> None:
    program = Path(__file__).with_name("hopper_pages_mutations.py")
    run = subprocess.run(
        [sys.executable, program, name], capture_output=True, text=True, timeout=SECONDS, env=os.environ
    )
    unnoticed = run.returncode == 0 and run.stdout.split()[-1:] == ["unnoticed"]
    noticed = "numbers" in run.stdout or any(words in run.stderr for words in NOTICED)
    assert (unnoticed, noticed) == ((True, False) if name.endswith("none") else (False, True)), run.stderr[-2000:]
