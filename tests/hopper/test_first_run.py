"""benchmarks/gpu_first_run.py, as far as it runs without a GPU: its numbers in the interpreter, its page, its exit status."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {"dims": (64, 64), "heads": (2, 2)}
# Calls that the reference of the script describes by more than a mask.
CASES = (
    "causal",
    "float16",
    "gqa",
    "few queries",
    "packed",
    "lengths",
    "positions",
    "traced offset",
    "sinks",
    "boolean array",
    "dropout",
    "int8",
    "float8_e4m3fn",
    "latents, few queries",
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script and the module of its numbers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as the script sets it
    return importlib.import_module("gpu_first_run")


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < JAX_NEEDED, reason=f"jax {jax.__version__}: no kernels in Mosaic GPU")
@pytest.mark.parametrize("generation", ["hopper", "blackwell"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_a_feature(benchmark: Any, name: str, generation: str) -> None:
    feature = benchmark.features(120)[name]
    heads = {"heads": (4, 2) if name in ("gqa", "few queries") else (4, 4), "dims": (64, 64)}
    row = benchmark.check(feature if "latents" in feature else feature | heads, generation, interpret=True)
    assert "refused" not in row
    assert row["agrees"], row


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < JAX_NEEDED, reason=f"jax {jax.__version__}: no kernels in Mosaic GPU")
def test_wrong_numbers_disagree(benchmark: Any) -> None:
    feature = benchmark.features(120)["lengths"] | SMALL | {"heads": (4, 4)}
    row = benchmark.check(feature | {"keys": feature["keys"] - 2}, "hopper", interpret=True)
    assert not row["agrees"]
    assert row["alike"]


def test_nothing_runs_without_a_gpu(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "first.json"
    monkeypatch.setattr(sys, "argv", ["gpu_first_run.py", "--json", str(file)])
    assert benchmark.main() == 2
    assert "cpu" in capsys.readouterr().err
    assert not file.exists()


def test_a_run_is_written_row_by_row(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"agrees": True, "alike": True, "forward": 1e-3, "lse": 1e-6}
    made = {
        "right": right,
        "wrong": right | {"agrees": False, "forward": 0.5},
        "not taken": {"agrees": True, "refused": ["a.b"]},
    }

    step = {"ms": {"attnops": 0.5}, "GB/s": {"attnops": 2000}, "of published": {"attnops": 0.6}, "failed": {}}
    monkeypatch.setattr(benchmark.gpu, "generation", lambda: "hopper")
    rows = [
        *(("numbers", name, lambda name=name: made[name]) for name in (*made, "raises")),
        ("pages", "32 x 8k", lambda: step),
    ]
    monkeypatch.setattr(benchmark, "steps", lambda generation: iter(rows))
    timed = {"ms": {"attnops": 2.0, "cudnn": 1.0}, "failed": {"jax mosaic": "no such shape"}}
    monkeypatch.setattr(benchmark.gpu, "cells", lambda: {"D64 causal forward": {}})
    monkeypatch.setattr(benchmark.gpu, "time_cells", lambda cells, rounds: iter([(name, timed) for name in cells]))
    file, page = tmp_path / "first.json", tmp_path / "first.md"
    monkeypatch.setattr(sys, "argv", ["gpu_first_run.py", "--json", str(file), "--page", str(page)])
    assert benchmark.main() == 1
    assert "disagree: wrong, raises;" in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert "| right | yes | yes | 1.0e-03 | 1.0e-06 | - | - | - |" in lines
    assert "| wrong | **no** | yes | 5.0e-01 | 1.0e-06 | - | - | - |" in lines
    assert "- not taken: refused (a.b)" in lines
    assert "- raises: KeyError: 'raises'" in lines
    assert "| 32 x 8k | attnops | 0.5 | 2000 | 0.6 |" in lines
    assert "| D64 causal forward | 2.000 | - | 2.00 | - | - | - | - | - | - | - |" in lines
    assert "- D64 causal forward, jax mosaic: no such shape" in lines
