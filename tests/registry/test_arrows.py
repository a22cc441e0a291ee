"""Imports point downward, lazy ones and those for type checkers too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# From the top to the ground; rooms of one floor don't know each other. docs/design.md shows the same.
FLOORS = (
    ("cli",),
    ("adapters", "verify"),
    ("operators",),
    ("registry",),
    ("planning", "models"),
    ("masks", "sharding"),
    ("errors",),
)
FLOOR = {room: len(FLOORS) - number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for room in FLOOR for path in (ROOT / room).rglob("*.py"))


def _rooms(path: Path) -> set[str]:
    """The rooms that a file imports from, at any place."""
    parts = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(name.name.split(".")[0] == "attnops" for name in node.names), (
                f"{path}: import ..., relatively"
            )
        if not isinstance(node, ast.ImportFrom):
            continue
        assert (node.module or "").split(".")[0] != "attnops" or node.level, f"{path}: from ..., relatively"
        if node.level:
            base = (*parts[: len(parts) - node.level + 1], *(node.module or "").split("."))
            found.add(base[0] or node.names[0].name)
    return found


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(ROOT).as_posix() for path in FILES])
def test_arrows_point_downward(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    room = name.split("/")[0]
    up = {other for other in _rooms(path) - {room} if FLOOR.get(other, 99) >= FLOOR[room]}
    assert not up, f"{name} imports {', '.join(sorted(up))}, which stands no lower than {room}"


def test_every_room_has_its_floor() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(FLOOR)
