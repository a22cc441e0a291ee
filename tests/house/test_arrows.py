"""The house: imports point downward and never in a circle, lazy ones and those for type checkers too."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# From the top to the ground; rooms of one floor don't know each other. docs/design.md shows the same.
FLOORS = (
    ("cli",),
    ("advising", "certify"),
    ("adapters", "authoring", "verify", "serving"),
    ("operators",),
    ("registry",),
    ("models",),
    ("planning",),
    ("call_arguments",),
    ("masks", "scores", "sharding"),
    ("drawing",),
    ("devices", "names", "page_layouts", "pytree_export", "strict_json", "symbolic"),
    ("errors", "compat", "distribution", "lazy", "pydantic_fields"),
)
FLOOR = {room: len(FLOORS) - number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for room in FLOOR for path in [*(ROOT / room).rglob("*.py"), *ROOT.glob(f"{room}.py")])
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]


def _module(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(".py").removesuffix("/__init__").split("/"))


MODULES = {_module(name): name for name in NAMES}


def _imports(path: Path) -> set[str]:
    """The files of the package that a file imports, at any place in it."""
    here, found = path.relative_to(ROOT).parts[:-1], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(name.name.split(".")[0] == "attnops" for name in node.names), f"{path}: import relatively"
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.level or (node.module or "").split(".")[0] != "attnops", f"{path}: import relatively"
        if node.level:
            base = (*here[: len(here) - node.level + 1], *filter(None, (node.module or "").split(".")))
            found |= {MODULES.get((*base, name.name)) or MODULES[base] for name in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_arrows_point_downward(path: Path) -> None:
    room = _module(path.relative_to(ROOT).as_posix())[0]
    up = {name for name in _imports(path) if _module(name)[0] != room and FLOOR[_module(name)[0]] >= FLOOR[room]}
    assert not up, f"{path.relative_to(ROOT)} imports {', '.join(sorted(up))}, which stand no lower than {room}"


# Functions on raw arrays: they know neither problems, placements nor calls.
def _is_kernel(name: str) -> bool:
    return name.startswith("operators/") and not {"kernel", "kernels"}.isdisjoint(name.split("/"))


KERNELS = [path for path, name in zip(FILES, NAMES, strict=True) if _is_kernel(name)]
BELOW_KERNELS = {
    "masks",
    "scores",
    "errors",
    "compat",
    "symbolic",
    "devices",
    "page_layouts",
    "lazy",
    "pydantic_fields",
}


@pytest.mark.parametrize("path", KERNELS, ids=[path.relative_to(ROOT).as_posix() for path in KERNELS])
def test_kernels_know_nothing_above_them(path: Path) -> None:
    above = {name for name in _imports(path) if not _is_kernel(name) and _module(name)[0] not in BELOW_KERNELS}
    assert not above, (
        f"{path.relative_to(ROOT)} imports {', '.join(sorted(above))}; kernels import {BELOW_KERNELS} alone"
    )


def test_no_circles() -> None:
    known = {name: _imports(path) - {name} for name, path in zip(NAMES, FILES, strict=True)}
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        pytest.fail(f"files that import each other: {' <- '.join(error.args[1])}")


def test_every_room_has_its_floor() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms | {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"} == set(FLOOR)


@pytest.mark.parametrize("name", [name for name in NAMES if not _is_kernel(name)])
def test_a_file_is_short_and_says_what_it_is(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text.count("\n") <= 300, f"{name} has {text.count(chr(10))} lines; give what it does to two files"
    assert ast.get_docstring(ast.parse(text)), f"{name} has no first line that says what it is"
