"""`attnops advise` from the command line: table, JSON, the file it writes, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnops import Declaration
from attnops.cli.app import main

CALL = {"batch": 2, "q_len": 512, "q_heads": 8, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16", "mode": "prefill"}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "call.json"
    path.write_text(json.dumps({"operation": "splash", "call": CALL}))
    return str(path)


def test_table_and_written_file(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "best.json"
    assert main(["advise", config, "--target", "v5e:2x2", "--compile", "0", "--write", str(path), "--rows", "3"]) == 0
    out = capsys.readouterr().out
    for word in (
        "mesh",
        "why not",
        "forward",
        "memory",
        "refused",
        "and ",
        "more; --rows shows them",
        str(path),  # in a line of its own where it is long
        "written:",
    ):
        assert word in out
    written = Declaration.load(path)
    assert written.call.batch == 2
    assert main(["plan", str(path)]) == 0
    assert "TPU v5 lite" in capsys.readouterr().out


def test_a_pipe_has_80_columns(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["advise", config, "--target", "v5e:2x2", "--compile", "0"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "estimates" in out


def test_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--mode", "train", "--mesh", "tp=2", "--operation", "splash"]
    assert main(["advise", config, "--target", "v5e:2x2", "--compile", "0", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["target"] == "v5e:2x2"
    first = data["entries"][0]
    assert first["sizes"]["tp"] == 2
    assert first["declaration"]["call"]["mode"] == "train"
    total = sum(term["seconds"] for one in first["estimate"]["passes"] for term in one["terms"])
    assert first["estimate"]["seconds"] == pytest.approx(total)


def test_what_goes_wrong(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2: bad input. 1: nothing can run."""
    base = ["advise", config, "--compile", "0", "--target"]
    for more, word in (
        (["v9:1"], "v9:1"),
        (["v5e:2x2", "--devices", "3"], "no part of that size"),
        (["v5e:2x2", "--mesh", "ep=2"], "isn't searched"),
        (["v5e:2x2", "--write", str(tmp_path / "none" / "x.json")], "wanted a file to write to"),
    ):
        assert main([*base, *more]) == 2
        assert word in capsys.readouterr().err
    assert main([*base, "v5e:2x2", "--mesh", "tp=3"]) == 1
    assert "nothing can run this call on v5e:2x2" in capsys.readouterr().err
    assert main(["advise", config]) == 2
