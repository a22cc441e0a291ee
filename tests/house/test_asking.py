"""What is known of an implementation, a config, a plan or an operation is asked of it: nobody tests which one it is."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnops import OperationRegistry

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"tests", "tools", "docs", "examples", "benchmarks", "packaging", "build", "site"}
FILES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
    if not (top := path.relative_to(ROOT).parts[0]).startswith(".") and top not in OUTSIDE
}
ROOTS = {"Implementation", "OperationConfig", "PlannedOperation", "Decision", "Problem", "CacheArrays", "Route"}
# Whether something is a config, an object or a method, or metadata at all is asked of what a user gave.
GIVEN = {"Implementation", "OperationConfig"}
# Objects whose fields or methods depend on which of their kind they are.
SUBJECTS = {"config", "plan", "decided", "runs", "route", "implementation", "operation"}


@functools.cache
def _operations() -> frozenset[str]:
    return frozenset(OperationRegistry.names())


def _bases(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(base, ast.Name | ast.Attribute):
            yield _last(base)


def _last(node: ast.AST) -> str:
    """The identifier that an expression ends with."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@functools.cache
def _kinds() -> frozenset[str]:
    """Every class of the package that is one of the roots, by name."""
    classes = [
        (node.name, {*_bases(node)})
        for tree in FILES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    kinds, before = set(ROOTS), 0
    while len(kinds) > before:
        before = len(kinds)
        kinds |= {name for name, bases in classes if bases & kinds}
    return frozenset(kinds - GIVEN)


@functools.cache
def _folders() -> frozenset[str]:
    """Where implementations are written: what stands there knows the configs of its own."""
    kinds = _kinds() | {"Implementation"}
    written = {
        name
        for name, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(base.endswith("Implementation") and base in kinds for base in _bases(node))
    }
    return frozenset("/".join(name.split("/")[:2]) + "/" for name in written if name.startswith("operators/"))


def _named(node: ast.AST, aliases: dict[str, str]) -> set[str]:
    found = {_last(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}
    return {aliases.get(name, name) for name in found}


def _texts(node: ast.AST) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def _is_name_of_one(node: ast.AST) -> bool:
    """Whether an expression is a name of an operation, or of an implementation."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return _last(node.value) in SUBJECTS
    return _last(node) in SUBJECTS


def _tests(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is asked) of each test of which implementation, config, plan or operation something is."""
    aliases = {
        item.asname: item.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for item in node.names
        if item.asname
    }
    own_folder = name.startswith(tuple(_folders()))
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called, arguments = node.func.id, node.args
            if called in ("isinstance", "issubclass") and _named(arguments[1], aliases) & _kinds():
                found = ast.unparse(node)
            # A field of some config, by its name: the same question in other words.
            of_one = called in ("getattr", "hasattr") and _last(arguments[0]) in SUBJECTS
            if of_one and isinstance(arguments[1], ast.Constant) and not own_folder and not name.startswith("models/"):
                found = ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = set[str]().union(*map(_texts, sides))
            if any(text.startswith("forward_") for text in texts):
                found = ast.unparse(node)
            if texts & _operations() and any(map(_is_name_of_one, sides)):
                found = ast.unparse(node)
            classes = any(isinstance(side, ast.Call) and _last(side.func) == "type" for side in sides)
            if classes and _named(node, aliases) & _kinds():
                found = ast.unparse(node)
        elif isinstance(node, ast.match_case):
            texts = _texts(node.pattern)
            if _named(node.pattern, aliases) & _kinds() or any(text.startswith("forward_") for text in texts):
                found = ast.unparse(node.pattern)
        if found:
            yield node.lineno if hasattr(node, "lineno") else node.pattern.lineno, found  # type: ignore[attr-defined]


@pytest.mark.parametrize("room", sorted({name.partition("/")[0] for name in FILES}))
def test_nobody_asks_which_one_it_is(room: str) -> None:
    files = [name for name in FILES if name.partition("/")[0] == room]
    asked = [f"{name}:{line}: {what}" for name in files for line, what in _tests(name, FILES[name])]
    assert not asked, f"ask it instead, by a field or a method of its base class: {'; '.join(asked)}"


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(config, SplashConfig)", "issubclass(operation, PagedOperation)", "isinstance(plan, IndexPlan | Plan)",
        "type(plan) is TablePlan", "isinstance(part, StatePlan)", "isinstance(problem, AttentionProblem)",
        "method == 'forward_tpu'", "method in ('forward_native',)", "plan.operation.name == 'ring'", "operation in ('splash',)",
        "hasattr(plan.config, 'path')", "getattr(config, 'chunk_size', None)", "isinstance(route, NativeRoute)",
    ],
)  # fmt: skip
def test_the_rule_sees(line: str) -> None:
    assert list(_tests("verify/any.py", ast.parse(line)))
    assert _kinds() >= {"SplashConfig", "PagedOperation", "IndexPlan", "StatePlan", "AttentionProblem", "NativeRoute"}
    assert _folders() >= {"operators/splash/", "operators/vanilla/", "operators/recurrent/"}
    assert "operators/call/" not in _folders()


def test_the_rule_sees_a_case_and_another_name() -> None:
    text = "from x import SplashConfig as C\nisinstance(y, C)\nmatch y:\n    case VanillaConfig():\n        pass\n"
    assert [line for line, _ in _tests("verify/any.py", ast.parse(text))] == [2, 4]
