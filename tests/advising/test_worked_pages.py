"""The worked pages hold: each command that they show prints what they say."""

from __future__ import annotations

import doctest
import shlex
from pathlib import Path

import pytest

from attnops.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "advise-examples.md"
_BEGIN = "```text\n$ attnops "
SHOWN = [block.partition("```")[0] for block in PAGE.read_text(encoding="utf-8").split(_BEGIN)[1:]]


def test_the_four_cases_are_there() -> None:
    assert len(SHOWN) == 6
    for name in ("llama3_70b_train", "gemma3_27b_global", "gemma3_27b_local", "video_dit", "decode_64"):
        assert any(name in block for block in SHOWN)


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.partition("\n")[0])
def test_a_command_prints_what_the_page_says(
    block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    command, _, wanted = block.partition("\n")
    assert main(shlex.split(command)) == 0
    got = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    if not doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS):
        pytest.fail(f"the page says\n{wanted}\nand what comes is\n{got}", pytrace=False)
