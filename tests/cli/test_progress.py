"""Bars: on a terminal while work goes on, nowhere else."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attnops.cli import progress
from attnops.cli.progress import bar
from attnops.cli.run_call import time_calls


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal on standard error gets."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "errors", lambda: console)
    return written


def test_a_terminal_sees_how_much_is_done(terminal: io.StringIO) -> None:
    with bar("compile for v5e:2x2 [bold]") as told:
        told(1, 2, "forward")
    said = terminal.getvalue()
    for part in ("compile for v5e:2x2 [bold]", "1 of 2", "forward"):
        assert part in said


def test_quiet_and_pipes_see_nothing(terminal: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    with bar("compile", quiet=True) as told:
        told(1, 2, "")
    assert terminal.getvalue() == ""
    progress.errors = lambda: Console(file=terminal, force_terminal=False)  # the fixture puts it back
    with bar("compile") as told:
        told(1, 2, "")
    assert terminal.getvalue() == ""


def test_work_that_takes_long_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe too, and for each piece of work anew."""
    monkeypatch.setattr(progress, "EVERY", 0.2)
    with bar("compile") as told:
        told(0, 2, "forward")
        time.sleep(0.55)
        told(1, 2, "backward")
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["attnops: compile: forward: 0.2 s so far", "attnops: compile: forward: 0.4 s so far"]
    with bar("compile", quiet=True):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_each_turn_is_told() -> None:
    turns: list[tuple[int, int, str]] = []
    time_calls([], 3, lambda *told: turns.append(told))
    assert turns == [(0, 3, ""), (1, 3, ""), (2, 3, "")]


def test_verify_and_run_have_bars(
    attnops: Callable[..., Any], config: Callable[..., Path], terminal: io.StringIO
) -> None:
    for command, says in (("run", ("compile", "run", "check against")), ("verify", ("compile for", "forward"))):
        more = ("--check", "--repeats", 1) if command == "run" else ()
        result = attnops(command, config(), *more)
        assert result.status == 0
        assert all(part in terminal.getvalue() for part in says)
        assert "of 2" not in result.out
