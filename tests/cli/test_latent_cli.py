"""A latent attention's file in the commands: planned, compiled and tuned in the form that costs less; `run` refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
    assert shapes["value"]["shape"][3] == dims[1]
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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run"], "whose arrays this command doesn't draw"),
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
