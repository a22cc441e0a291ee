"""A file with "enabled": false: the command works on it and says what that word does."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SAID = '"enabled" is false: behind an adapter the framework\'s own attention runs'


@pytest.fixture
def disabled(tmp_path: Path) -> Path:
    path = tmp_path / "disabled.json"
    call = {"q_len": 128, "q_heads": 1, "head_dim": 128}
    path.write_text(json.dumps({"operation": "splash", "enabled": False, "call": call}))
    return path


def _words(text: str) -> str:
    return " ".join(text.split())


def test_plan_and_run_say_so(attnops: Callable[..., Any], disabled: Path, config: Callable[..., Path]) -> None:
    for command in (
        ("plan", disabled),
        ("run", disabled, "--repeats", 1),
        ("run", disabled, "--repeats", 1, "--explain"),
    ):
        result = attnops(*command)
        assert result.status == 0
        assert SAID in _words(result.out), command
    assert SAID not in _words(attnops("plan", config()).out)


def test_json_says_so(attnops: Callable[..., Any], disabled: Path, config: Callable[..., Path]) -> None:
    data = json.loads(attnops("plan", disabled, "--json").out)
    assert data["enabled"] is False
    assert data["implementation"] == "splash.forward_native"
    assert any(SAID in note for note in data["notes"])
    data = json.loads(attnops("plan", config(), "--json").out)
    assert data["enabled"] is True
    assert not any(SAID in note for note in data["notes"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'attnops[tpu]'")
def test_verify_and_tune_say_so(attnops: Callable[..., Any], disabled: Path, tmp_path: Path) -> None:
    for command in (("verify", disabled), ("tune", disabled, "--most", 1, "--cache", tmp_path)):
        result = attnops(*command, "--target", "v5e:2x2")
        assert result.status == 0
        assert SAID in _words(result.out), command
        (report,) = json.loads(attnops(*command, "--target", "v5e:2x2", "--json").out)
        assert report["enabled"] is False
        assert SAID in report["notes"][0]
