"""docs/certificates.md is made of the saved results, and the saved scripts are those of the results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from attnops.certify.families import family_of
from attnops.certify.features import FEATURES
from attnops.certify.targets import subject_named

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("certificates", ROOT / "tools" / "certificates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_saved_results(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page()


def test_every_result_is_of_these_features_and_has_its_scripts(tool: ModuleType) -> None:
    found = tool.certificates()
    scripts = set()
    for certificate in found:
        family = (
            FEATURES if certificate.family == "attention" else family_of(subject_named(certificate.target)).features
        )
        names = ["plain", *(one.name for one in family)]
        assert [one.feature for one in certificate.features] == names, f"{certificate.target}: run it again"
        assert {row.verdict for row in certificate.features} <= {"right", "wrong", "refused", "not expressible"}
        for n, case in enumerate(certificate.wrong_cases):
            file = tool.FOLDER / f"{tool.file_name(certificate.target)}-{n + 1}.py"
            assert file.read_text(encoding="utf-8") == case.script
            scripts.add(file)
    assert scripts == set(tool.FOLDER.glob("*.py"))


def test_issues_are_of_wrong_cases(tool: ModuleType) -> None:
    wrong = {
        f"{one.target} {name}" for one in tool.certificates() for case in one.wrong_cases for name in case.features
    }
    assert set(tool.issues()) <= wrong
