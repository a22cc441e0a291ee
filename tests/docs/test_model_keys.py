"""The tables of model configs in the manual are those of the code."""

from __future__ import annotations

import re

import pages
import pytest

from attnops.models.families import FAMILIES, PARTS
from attnops.models.keys import ATTENTION, OTHER, REFUSED
from attnops.models.plain_families import PLAIN_FAMILIES

PAGE = pages.ROOT / "docs" / "model-configs.md"
MODELS = pages.ROOT / "tests" / "data" / "models"


def _rows(mark: str) -> list[tuple[str, str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"<!-- {mark} -->") + 4  # a blank line, the head and the rule
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, second = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append((first, second))
    return rows


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_keys_of_attention() -> None:
    assert [(_names(key)[0], text[1:]) for key, text in _rows("keys: attention")] == [
        (key, text[1:]) for key, text in ATTENTION.items()
    ]


def test_keys_that_are_refused() -> None:
    assert [(_names(key)[0], text[1:]) for key, text in _rows("keys: refused")] == [
        (key, why[1:]) for key, (_, why) in REFUSED.items()
    ]


def test_subjects_of_keys_that_are_not_read() -> None:
    told = PAGE.read_text(encoding="utf-8").partition("<!-- keys: other -->\n\n")[2].partition("\n\n")[0]
    assert [line[3:] for line in told.splitlines()] == [subject[1:] for subject in OTHER]


def test_every_family_stands_there_once() -> None:
    named = [name for cell, _ in _rows("families") for name in _names(cell)]
    assert sorted(named) == sorted(
        {name.split()[0] for name in FAMILIES} - set(PLAIN_FAMILIES)
    )  # model-types.md has these
    assert {name.split()[0] for name in FAMILIES if " " in name} == set(PARTS)


@pytest.mark.parametrize(
    "path", sorted((pages.ROOT / "examples" / "models").glob("*.json")), ids=lambda path: path.name
)
def test_example_configs_are_those_that_are_tested(path: pages.Path) -> None:
    assert path.read_text() == (MODELS / path.name).read_text()
