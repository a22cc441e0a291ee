"""A latent attention's file in the commands: planned, compiled, tuned and run in the form that costs less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnops.cli import run_latent
from attnops.cli.app import main

V3 = {"heads": 128, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512}
SMALL = {"heads": 4, "nope_dim": 16, "rope_dim": 8, "value_dim": 16, "latent_dim": 32}


def _file(folder: Path, latent: dict[str, Any], call: dict[str, Any], **fields: Any) -> str:
    path = folder / "latent.json"
    path.write_text(json.dumps({"operation": "vanilla", "latent": latent, "call": call, **fields}))
    return str(path)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("call", "form", "kv_heads", "dims"),
    [
        ({"q_len": 2048, "causal": True}, "expanded", 128, (192, 128)),
        ({"q_len": 1, "kv_len": 2048, "causal": False}, "absorbed", 1, (576, 512)),
    ],
)
def test_a_plan_is_of_the_cheaper_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: dict[str, Any], form: str, kv_heads: int, dims: Any
) -> None:
    plan = _json(capsys, "plan", _file(tmp_path, V3, call))
    shapes = plan["tensors"]
    assert shapes["key"]["shape"][2:] == [kv_heads, dims[0]]
    value = shapes["value"]["shape"]  # of the absorbed form no array of the call
    assert value is None if form == "absorbed" else value[3] == dims[1]
    assert any(f"latent attention, {form}, chosen" in note for note in plan["notes"])
    other = {"expanded": "absorbed", "absorbed": "expanded"}[form]
    plan = _json(capsys, "plan", _file(tmp_path, V3 | {"form": other}, call))
    assert any(f"latent attention, {other}, declared" in note for note in plan["notes"])


def test_both_passes_compile_from_the_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"batch": 2, "q_len": 64, "causal": True}
    (report,) = _json(capsys, "verify", _file(tmp_path, SMALL | {"form": "absorbed"}, call))
    # q_nope and q_rope of 4 heads, latents and rotary keys, w_uk and w_uv, in float32; then the output and all gradients.
    arrays = 4 * (2 * 64 * (4 * (16 + 8) + 32 + 8) + 32 * 4 * (16 + 16))
    output = 4 * 2 * 64 * 4 * 16
    forward, both = report["passes"]
    assert (forward["argument_bytes"], forward["output_bytes"]) == (arrays, output)
    assert (both["argument_bytes"], both["output_bytes"]) == (arrays + output, pytest.approx(arrays + output, abs=64))
    assert any("latent attention, absorbed, declared" in note for note in report["plan"]["notes"])


MADE = {"query_latent_dim": 24, "rope_pairs": "interleaved"}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "expanded": ({"form": "expanded"}, {"batch": 2, "q_len": 16, "causal": True, "segment_ids": 3}, ()),
    "absorbed": ({"form": "absorbed"}, {"q_len": 4, "kv_len": 40, "query_offset": 36, "softmax_aux": [4]}, ()),
    "made": (MADE | {"form": "absorbed"}, {"batch": 2, "q_len": 12, "layout": "bhtd", "logits_soft_cap": 5.0}, ()),
    "halves": (MADE | {"rope_pairs": "halves"}, {"q_len": 24, "layout": "thd", "segment_ids": 2}, ()),
    "bfloat16": (MADE, {"q_len": 8, "dtype": "bfloat16", "return_lse": True}, ()),
    "mesh": (MADE | {"form": "absorbed"}, {"batch": 4, "q_len": 16}, ("--mesh", "fsdp=2,tp=2")),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_held_against_the_reference(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latent, call, options = RUNS[name]
    ran = _json(capsys, "run", _file(tmp_path, SMALL | latent, call), "--check", "--repeats", "1", *options)
    assert [check["what"] for check in ran["checks"]] == ["output", *["lse"] * ("return_lse" in call)]
    assert all(check["passed"] for check in ran["checks"])


def test_a_wrong_scale_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = run_latent._heads
    monkeypatch.setattr(run_latent, "_heads", lambda *x: tuple(1.01 * part for part in heads(*x)))
    assert main(["run", _file(tmp_path, SMALL, {"q_len": 16}), "--check", "--quiet"]) == 1
    assert "check failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "--inputs", "arrays.npz"], "--inputs"),
        (["plan", "--inputs", "arrays.npz"], "--inputs arrays.npz beside a latent attention"),
    ],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], message: str) -> None:
    path = _file(tmp_path, SMALL, {"q_len": 64, "causal": True})
    assert main([command[0], path, *command[1:]]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_schema_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"heads", "form"} <= set(schema["$defs"]["LatentDims"]["properties"])
