"""The command inside this process, and files for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnops.cli.app import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What it printed, wherever lines end."""
        return " ".join(self.out.split())


Command = Callable[..., Result]


@pytest.fixture
def examples() -> Path:
    return EXAMPLES


@pytest.fixture
def attnops(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `attnops` with these arguments."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it; lines would fold elsewhere
    monkeypatch.setattr("attnops.cli.progress.EVERY", 3600.0)  # a slow machine says nothing more

    def command(*arguments: object) -> Result:
        status = main([str(argument) for argument in arguments])
        return Result(status, *capsys.readouterr())

    return command


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Write a small declaration; keyword arguments go into its call."""

    def write(operation: str = "vanilla", metadata: dict[str, Any] | None = None, **call: Any) -> Path:
        sizes = {"q_len": 16, "q_heads": 4, "head_dim": 8}
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"operation": operation, "metadata": metadata or {}, "call": sizes | call}))
        return path

    return write
