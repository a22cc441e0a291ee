"""A call file with a score: planned, verified, run, advised on and reported; inputs from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CALL: dict[str, Any] = {
    "batch": 2, "q_len": 32, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "causal": True,
    "score": ["alibi", {"kind": "relative_bias", "buckets": {"kind": "clip", "left": 7}}, "temperature"],
    "operands": {"temperature": [4, 32]},
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "call.json"
    file.write_text(json.dumps({"operation": "vanilla", "metadata": {"mesh": {"dp": 2, "tp": 2}}, "call": CALL}))
    return file


def test_a_plan_has_the_score_and_the_specs_of_its_arrays(attnops: Callable[..., Any], path: Path) -> None:
    said = attnops("plan", path).said
    assert "score alibi >> relative_bias(buckets=clip(left=7, right=0)) >> temperature" in said
    for spec in ("slopes: P(tp) 4 -> 2", "table: P(-, tp) 8x4 -> 8x2", "temperature: P(tp, -) 4x32 -> 2x32"):
        assert spec in said
    found = json.loads(attnops("plan", path, "--json").out)
    assert [part["kind"] for part in found["score"]["scores"]] == ["alibi", "relative_bias", "temperature"]
    assert {name: found["tensors"][name]["shape"] for name in ("slopes", "table", "temperature")} == {
        "slopes": [4], "table": [8, 4], "temperature": [4, 32]
    }  # fmt: skip


def test_the_compiled_gradient_sums_the_arrays_in_their_own_shapes(attnops: Callable[..., Any], path: Path) -> None:
    """Over dp: 8 x 2 of the table and 2 x 32 of the temperature, in float32; the slopes are constants."""
    result = attnops("verify", path, "--target", "here")
    assert result.status == 0
    assert f"1 all-reduce of {(8 * 2 + 2 * 32) * 4} B over dp" in result.said


def test_advice_and_a_report(attnops: Callable[..., Any], path: Path, tmp_path: Path) -> None:
    result = attnops("advise", path, "--target", "v5e:2x2", "--compile", 0)
    assert result.status == 0
    assert "vanilla.forward_native" in result.said
    page = tmp_path / "report.html"
    assert attnops("report", path, "--output", page).status == 0
    assert "alibi &gt;&gt; relative_bias(buckets=clip(left=7, right=0))" in page.read_text()


def test_arrays_from_a_file(attnops: Callable[..., Any], path: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = {"query": (2, 32, 4, 8), "key": (2, 32, 2, 8), "value": (2, 32, 2, 8), "table": (8, 4)}
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, **arrays)
    result = attnops("run", path, "--inputs", inputs, "--repeats", 1)
    assert result.status == 2
    assert "holds no temperature, which the score" in " ".join(result.err.split())
    np.savez(inputs, **arrays, temperature=random.standard_normal((4, 1)).astype(np.float32))
    result = attnops("run", path, "--inputs", inputs, "--repeats", 1)
    assert result.status == 2
    assert "temperature has shape (4, 1), but call.operands.temperature=[4, 32]" in " ".join(result.err.split())
    np.savez(inputs, **arrays, temperature=random.standard_normal((4, 32)).astype(np.float32))
    result = attnops("run", path, "--inputs", inputs, "--check", "--repeats", 1)
    assert (result.status, result.err) == (0, "")
    assert "pass output against float64 reference" in result.said
    assert "a score function" in result.said  # why jax.nn isn't compared
