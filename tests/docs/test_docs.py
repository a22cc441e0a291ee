"""The manual holds: its code runs and prints what it says, its files are valid, its links and defaults are right.

A block's comments say how it is meant: `output` (what the block above prints; `...` stands for anything), `declaration`
(a config file), `exit: 2` (the command's exit status), `needs: libtpu` (skipped without that module; `a,b` needs both).
"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import os
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
from eformer.escale import PartitionAxis
from versions import JAX_0_9

import attnops
from attnops import OperationMetadata, OperationRegistry, Policy
from attnops.authoring import Operation
from attnops.cli.app import main
from attnops.cli.declared import declared
from attnops.operators.splash import SplashConfig
from attnops.operators.vanilla import VanillaConfig
from attnops.planning.policy import CHOICES
from attnops.registry.declaration import CallDeclaration, Declaration
from attnops.registry.metadata import PICKUP

DOCS = pages.ROOT / "docs"
each_page = pytest.mark.parametrize("page", pages.PAGES, ids=pages.IDS)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A folder with the examples, a module to run blocks in; what a page registers or sets is undone."""
    (tmp_path / "examples").symlink_to(pages.ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it; lines would fold elsewhere
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the README sets it, for its readers
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(OperationRegistry.names())
    yield module
    for name in set(OperationRegistry.names()) - before:
        OperationRegistry.unregister(name)


@each_page
def test_code_runs_and_prints_what_the_page_says(
    page: Path, reader: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: str | None = None
    left_out = False
    for block in pages.blocks(page):
        if "output" in block.marks and left_out:
            continue
        if "output" in block.marks:
            assert printed is not None, f"{block.place}: no block that runs stands above this output"
            _same_text(block, printed)
            printed = None
        elif block.language == "python":
            printed = None
            if left_out := _lacks(block):
                continue
            # The empty lines give the traceback the page's own line numbers.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), vars(reader))
            printed = capsys.readouterr().out
        elif block.language == "sh":
            left_out = _lacks(block)
            printed = None if left_out else _run_commands(block, capsys)


def _lacks(block: pages.Block) -> bool:
    """Whether a module that the block needs isn't installed."""
    names = block.marks.get("needs", "")
    if JAX_0_9 and "AbstractDevice(" in block.text:
        pytest.skip("jax 0.9: an AbstractDevice has no platform")
    return any(importlib.util.find_spec(name) is None for name in names.split(",") if name)


def _run_commands(block: pages.Block, capsys: pytest.CaptureFixture[str]) -> str | None:
    """Run the `attnops` lines of a shell block in this process; None if it has none."""
    commands = [line for line in block.text.splitlines() if line.startswith("attnops ")]
    if not commands or any(re.search(r"[<>|]", command) for command in commands):
        return None
    printed = ""
    for command in commands:
        status = main(shlex.split(command, comments=True)[1:])
        out, err = capsys.readouterr()
        printed += out + err
        assert status == int(block.marks.get("exit", "0")), f"{block.place}: {command}: status {status}\n{err}"
    return printed


def _same_text(block: pages.Block, printed: str) -> None:
    got, wanted = ("".join(f"{line.rstrip()}\n" for line in text.splitlines()) for text in (printed, block.text))
    if not doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS):
        pytest.fail(f"{block.place}: the page says\n{wanted}\nand what comes is\n{got}", pytrace=False)


@each_page
def test_files_in_the_page_are_valid(page: Path) -> None:
    for block in pages.blocks(page):
        if "declaration" in block.marks:
            declaration = Declaration.from_json(block.text, block.place)
            if declaration.in_pages:
                step = declared(declaration, None, None).plan(declaration.operation_metadata())
                assert step.implementation, block.place
                continue
            call = declaration.call_arguments(declaration.shapes())
            plan = OperationRegistry.create(declaration.operation, declaration.operation_metadata()).plan(**call)
            assert plan.kind != "refused", block.place
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language not in ("python", "sh", "text"):
            pytest.fail(f"{block.place}: language {block.language!r}; wanted python, sh, text, json or toml")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for number, line in pages.prose(page):
        for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}:{number}: {target} doesn't exist"
            if anchor:
                assert anchor in pages.anchors(file), f"{page.name}:{number}: {target}: no such heading"


SITE = [page for page in pages.PAGES if page.is_relative_to(DOCS)]
_WIDTH = 945  # pixels that a table may have in a window of 1400; measured with the letters below
_LETTER, _CELL, _CODE = 6.6, 20, 8


@pytest.mark.parametrize("page", SITE, ids=[page.relative_to(DOCS).as_posix() for page in SITE])
def test_no_table_is_wider_than_a_page(page: Path) -> None:
    """As manual.css has it: a cell that is one piece of code isn't broken, other text only between words."""
    tables: list[list[str]] = []
    for _, line in pages.prose(page):
        if not line.startswith("|"):
            tables.append([])
        elif tables:
            tables[-1].append(line)
    for lines in filter(None, tables):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        width = sum(max(_least(cell) for cell in column) for column in zip(*rows, strict=True))
        assert width <= _WIDTH, f"{page.name}: {lines[0]} is {width:.0f} pixels wide"


def _least(cell: str) -> float:
    """Pixels below which a cell is cut."""
    alone = cell.count("`") == 2 and not re.search(r"\]\(|\*\*|<br>", cell)  # the cell's only element
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    whole = re.findall(r"`[^`]*`", text) if alone else []
    words = [*whole, *re.split(r"<br>|[\s/-]", text.replace(whole[0], "") if whole else text)]
    return _CELL + max((_LETTER * len(word.strip("`*")) + _CODE * ("`" in word) for word in words), default=0.0)


def test_every_page_is_in_the_navigation() -> None:
    nav = (pages.ROOT / "mkdocs.yml").read_text()
    names = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert not [name for name in names if f": {name}\n" not in nav]


def test_the_api_reference_has_every_public_name() -> None:
    told = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    names = re.findall(r"^::: (\S+)$", told, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {f"attnops.{name}" for name in attnops.__all__} <= set(names)
    for name in names:  # each is there: a name that mkdocs can't find fails `make docs`, which takes longer
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name), name


@pytest.mark.parametrize("name", ["support_table", "model_types", "call_reference", "not_declared", "gallery"])
def test_a_page_that_a_tool_writes_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = _tool(name, monkeypatch)
    assert tool.PAGE.path.read_text(encoding="utf-8") == tool.PAGE.updated(), f"run `python tools/{name}.py --write`"
    if name == "call_reference":
        assert tool.documented() == tool.known()
    if name == "gallery":
        assert {path.stem: path.read_text(encoding="utf-8") for path in tool.PICTURES.glob("*.svg")} == tool.pictures()


def test_the_notebook_is_that_of_the_start_page(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = _tool("notebook", monkeypatch)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.notebook(), "run `python tools/notebook.py --write`"


def test_links_to_the_source_are_of_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = _tool("source_links", monkeypatch)
    for page in tool.PAGES:
        assert page.path.read_text(encoding="utf-8") == page.updated(), "run `python tools/source_links.py --write`"
    where = {"repository": "https://github.com/a/b", "branch": "main"}
    assert tool.colab(where) == "https://colab.research.google.com/github/a/b/blob/main/docs/notebooks/tour.ipynb"
    assert "placeholder" in tool.source(where | {"repository": "https://example.invalid/b"})
    assert "placeholder" not in tool.source(where)


def _tool(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(pages.ROOT / "tools"))
    spec = importlib.util.spec_from_file_location(name, pages.ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


# -- defaults: what a table says is what the code has ----------------------------------------------------------------


def test_arguments_of_a_call() -> None:
    given = list(inspect.signature(Operation.__call__).parameters.values())[1:]
    wanted = {p.name: "required" if p.default is p.empty else repr(p.default) for p in given}
    assert pages.table(DOCS / "semantics.md", "call") == wanted


def test_fields_of_the_metadata() -> None:
    metadata = OperationMetadata()
    values: dict[str, Any] = {
        name: getattr(metadata.policy if hasattr(metadata.policy, name) else metadata, name)
        for name in inspect.signature(OperationMetadata).parameters
    }
    values["runtime_softmax_dtype"] = values["runtime_softmax_dtype"].name
    wanted = {name: repr(value) for name, value in values.items()}
    assert metadata.partition_axis == PartitionAxis()
    wanted |= {"partition_axis": "PartitionAxis()", "partition_manager": "unset"}
    assert list(pages.table(DOCS / "config.md", "OperationMetadata").items()) == list(wanted.items())


def test_where_the_metadata_looks_in_a_config() -> None:
    told = pages.table(DOCS / "config.md", "base_config")
    named = {name.strip(" `"): of for names, of in told.items() for name in names.split(",")}
    assert {name: name if of == "the same name" else of for name, of in named.items()} == PICKUP


def test_fields_of_the_policy() -> None:
    told = pages.table(DOCS / "plan.md", "Policy")
    assert list(told.items()) == [(name, repr(value)) for name, value in vars(Policy()).items()]
    rows = (DOCS / "plan.md").read_text(encoding="utf-8").partition("<!-- defaults: Policy -->")[2].splitlines()
    for name, choices in CHOICES.items():
        row = next(row for row in rows if row.startswith(f"| `{name}` |"))
        assert all(f"`{choice!r}`" in row for choice in choices if isinstance(choice, str))


@pytest.mark.parametrize(
    ("name", "model", "text"),
    [
        ("SplashConfig", SplashConfig, repr),
        ("VanillaConfig", VanillaConfig, repr),
        ("call", CallDeclaration, json.dumps),
    ],
)
def test_fields_of_a_config(name: str, model: Any, text: Any) -> None:
    common = ("operation", "schema_version")
    wanted = {n: text(f.default) for n, f in model.model_fields.items() if n not in common}
    assert pages.table(DOCS / "config.md", name) == wanted
