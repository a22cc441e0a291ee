"""What a release is made of: links and URLs from one address, and workflows that pin what they run."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = runpy.run_path(str(ROOT / "packaging" / "distributions.py"))
WHERE = {"repository": "https://host.test/a/b", "documentation": "https://host.test/docs", "branch": "main"}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_readme_of_the_package_index_has_no_relative_link() -> None:
    readme = BUILD["absolute_links"]((ROOT / "README.md").read_text(encoding="utf-8"), WHERE)
    links = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://host.test/a/b/", "#", "https://"))] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", readme) + re.findall(r' src(?:set)?="([^"]+)"', readme)
    assert pictures
    assert all(link.startswith("https://host.test/a/b/raw/main/docs/pictures/") for link in pictures)


def test_a_link_to_a_file_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match=r"docs/none\.md"):
        BUILD["absolute_links"]("[x](docs/none.md#a)", WHERE)
    assert (
        BUILD["absolute_links"]("[x](LICENSE) [y](#z)", WHERE) == "[x](https://host.test/a/b/blob/main/LICENSE) [y](#z)"
    )


def test_the_project_urls() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    urls = tomllib.loads(BUILD["with_urls"](text, WHERE))["project"]["urls"]
    assert urls == {
        "Documentation": "https://host.test/docs",
        "Source": "https://host.test/a/b",
        "Issues": "https://host.test/a/b/issues",
        "Changelog": "https://host.test/a/b/blob/main/CHANGELOG.md",
    }
    assert "urls" not in tomllib.loads(text)["project"]  # they come from packaging/address.toml alone


def _release_check(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    monkeypatch.delitem(sys.modules, "distributions", raising=False)
    return runpy.run_path(str(ROOT / "packaging" / "release_check.py"))


def test_a_placeholder_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    unpublishable = _release_check(monkeypatch)["unpublishable"]
    with monkeypatch.context() as patch:
        patch.setitem(unpublishable.__globals__, "address", lambda: WHERE | {"repository": "https://example.invalid/x"})
        assert any(one.startswith("packaging/address.toml: repository is the placeholder") for one in unpublishable())
    monkeypatch.setitem(unpublishable.__globals__, "address", lambda: WHERE)
    told = unpublishable()
    assert not any("address.toml" in one for one in told)
    pages = [one.partition(":")[0] for one in told if "links to the placeholder" in one]
    placeholder = BUILD["PLACEHOLDER"] in BUILD["address"]()["repository"]
    assert pages == (["docs/index.md", "docs/start.md", "docs/notebooks/tour.ipynb"] if placeholder else [])


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--publish"], 1)])
def test_what_is_not_to_be_published_ends_the_check(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With all that it builds and tries left out."""
    main = _release_check(monkeypatch)["main"]
    (tmp_path / "dist").mkdir()
    changed = {"ROOT": tmp_path, "_run": lambda *command: (tmp_path / "dist").mkdir(exist_ok=True)}
    changed |= {"unpublishable": lambda: ["a placeholder"], "_try": lambda python, file: None}
    for name, value in changed.items():
        monkeypatch.setitem(main.__globals__, name, value)
    monkeypatch.setattr(sys, "argv", ["release_check.py", "--python", sys.executable, *arguments])
    assert main() == status


def test_an_interpreter_is_one_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = _release_check(monkeypatch)["interpreter"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shim, pyenv = tmp_path / "shims" / f"python{version}", tmp_path / "versions" / f"{version}.1" / "bin" / "python"
    for path, text in ((shim, "#!/bin/sh\nexit 127\n"), (pyenv, f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    assert interpreter(version) is None
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert interpreter(version) == str(pyenv)
    assert interpreter("2.0") is None


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_may_do_little(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE)


def test_one_action_has_one_commit() -> None:
    used = {action for path in WORKFLOWS for action in re.findall(r"uses: (\S+)", path.read_text())}
    assert len({action.partition("@")[0] for action in used}) == len(used)
