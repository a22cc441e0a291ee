"""eformer isn't loaded before one of its objects is passed or asked for, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("without_eformer.py")


@pytest.mark.parametrize(
    "arguments",
    [
        ["metadata", "manager"],
        ["--unblocked", "metadata"],
        pytest.param(["calls", "paged", "commands", "adapters"], marks=pytest.mark.slow),
        pytest.param(["--unblocked", "calls", "paged", "commands", "adapters"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_what_a_user_does(arguments: list[str]) -> None:
    command = [sys.executable, "-W", "error", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = "not loaded" if "--unblocked" in arguments else "absent"
    assert f"eformer {loaded}: {', '.join(a for a in arguments if a != '--unblocked')}" in done.stdout
