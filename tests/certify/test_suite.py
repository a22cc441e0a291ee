"""Three lines in an author's test file: what is right passes, what is wrong fails with a script, what is refused is skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnops
from attnops.certify import suite
from attnops.errors import UnknownNameError

HERE = Path(__file__).resolve().parent


def _pytest(folder: Path, function: str, arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(
        f"from planted import {function}\nfrom attnops.certify import suite\n\n"
        f"test_attention = suite({function}, {str(HERE / 'planted.toml')!r}, {arguments})\n"
    )
    package = Path(attnops.__file__).parent
    path = [str(HERE), str(package.parent), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rsf", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def test_a_suite_in_an_authors_file(tmp_path: Path) -> None:
    ran = _pytest(tmp_path, "window_off_by_one", "features=['window.left', 'scale', 'causal'], pairs=0")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    failed = set(re.findall(r"FAILED test_mine.py::test_attention\[(\S+)\]", ran.stdout))
    assert failed == {"window.left", "window.left-gradient"}
    script = ran.stdout[ran.stdout.index("import jax, jax.numpy as jnp, numpy as np") :]
    script = script[: script.index(".max())") + len(".max())")]
    told: dict[str, object] = {}
    exec(compile(script, "<script>", "exec"), told)
    (got,), (want,) = told["got"], told["want"]
    assert abs(got - want).max() > 1e-3


def test_a_refusal_is_skipped(tmp_path: Path) -> None:
    ran = _pytest(tmp_path, "refuses_windows", "features=['window.left', 'scale'], pairs=0")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "NotImplementedError: no window, got (2, 0)" in ran.stdout
    assert "2 skipped" in ran.stdout


def test_an_unknown_feature_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'window.left'\?"):
        suite(lambda q, k, v: q, "jax.nn", features=["window.lefd"])
