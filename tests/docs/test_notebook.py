"""The notebook is that of the start page, its cells run in a process of their own, and it opens where the project lives."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest

NOTEBOOK = pages.ROOT / "docs" / "notebooks" / "tour.ipynb"
RUN = Path(__file__).with_name("run_notebook.py")


@pytest.mark.slow  # the blocks of the page, which are the same, run with the quick ones
def test_the_cells_run_and_print_what_the_notebook_says(tmp_path: Path) -> None:
    data = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in data["cells"] if cell["cell_type"] == "code"]
    if importlib.util.find_spec("libtpu") is None:  # what its first cell installs
        for cell in code:
            cell["source"] = [line for line in cell["source"] if not line.startswith("!attnops verify")]
    here = tmp_path / "tour.ipynb"
    here.write_text(json.dumps(data), encoding="utf-8")
    command = tmp_path / "bin" / "attnops"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m attnops "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment.pop("XLA_FLAGS", None)  # the first cell sets it
    ran = subprocess.run(
        [sys.executable, str(RUN), str(here)],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    printed = json.loads(ran.stdout.splitlines()[-1])
    assert len(printed) == len(code)
    said = 0
    for cell, got in zip(code, printed, strict=True):
        for output in cell["outputs"]:
            wanted = "".join(output["text"])
            said += 1
            if not doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS):
                pytest.fail(f"{cell['id']} says\n{wanted}\nand what comes is\n{got}", pytrace=False)
    assert said >= 4
