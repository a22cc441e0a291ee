"""`attnops example`: what the manual's commands name is in the package and comes out of it."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnops.cli.example import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_written_and_its_command_runs(attnops: Callable[..., Any], name: str) -> None:
    result = attnops("example", name)
    assert (result.status, result.err) == (0, "")
    for file in EXAMPLES[name].files:
        assert Path("examples", file).read_bytes() == (ROOT / "examples" / file).read_bytes()
    command = result.said.partition("try attnops ")[2]
    assert attnops(*shlex.split(command), *(["--repeats", 1] if command.startswith("run") else [])).status == 0
    again = attnops("example", name)
    assert again.status == 0
    assert "there" in again.out
    assert "wrote" not in again.out


def test_a_file_of_ones_own_stays(attnops: Callable[..., Any]) -> None:
    path = Path("examples", "llama3_8b_layer.json")
    path.parent.mkdir()
    path.write_text("{}")
    result = attnops("example", "llama3_8b_layer")
    assert (result.status, result.out) == (2, "")
    assert "--to" in result.err
    assert path.read_text() == "{}"
    assert attnops("example", "llama3_8b_layer", "--to", "mine").status == 0
    assert Path("mine", path.name).exists()


def test_names(attnops: Callable[..., Any]) -> None:
    listed = attnops("example")
    assert all(name in listed.out for name in EXAMPLES)
    wrong = attnops("example", "llama3_8b_layr")
    assert wrong.status == 2
    assert "Did you mean 'llama3_8b_layer'?" in wrong.err


def test_the_wheel_has_them() -> None:
    """Every file is matched by a pattern of the package's data, and every command of the README names such a file."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["attnops"]
    packed = {path.relative_to(ROOT).as_posix() for pattern in data for path in ROOT.glob(pattern)}
    files = {f"examples/{file}" for example in EXAMPLES.values() for file in example.files}
    assert files <= packed
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("attnops ")]
    named = {word for line in commands for word in line.split() if word.startswith("examples/")}
    assert named
    assert named <= files
