"""What pyproject.toml packs is all that there is: an editable install would hide a folder that was forgotten."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

import attnops
from attnops import authoring
from attnops.cli.example import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {package: package.replace(".", "/").removeprefix("attnops").lstrip("/") for package in SETUPTOOLS["packages"]}
ROOMS = sorted(path.parent for path in ROOT.glob("*/__init__.py"))


def test_every_folder_with_code_is_packed() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for room in ROOMS for path in room.rglob("*.py")}
    assert folders | {""} == set(FOLDERS.values())


def test_every_file_that_is_not_code_is_packed() -> None:
    data = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in room.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    } | {"py.typed"}
    data |= {f"examples/{file}" for example in EXAMPLES.values() for file in example.files}
    packed = {
        path.relative_to(ROOT).as_posix()
        for package, names in SETUPTOOLS["package-data"].items()
        for name in names
        for path in (ROOT / FOLDERS[package]).glob(name)
    }
    assert data == packed


# What users import; a name that goes is a change that the changelog tells.
PUBLIC = """
    Attention AttentionOutput AttnOpsError AttnShardingRules BlockSparseConfig Blocks Causal Chunked ConfigError
    Declaration Dense FallbackWarning FlashAttention2Config Full InputError KVCache LayerGroup Lengths Mask
    MaskFunction MaskWarning ModelDeclaration OperationMetadata OperationRegistry PagePool PartitionAxis Plan Policy
    Positions Prefix RaggedBatch RefusedError SdpaConfig SegmentIds ShardingError ShardingWarning SlidingWindow
    SplashConfig VanillaConfig advise check_processes dot_product_attention mask_from_dict
    register_mask_function shardings_for ALiBi RelativeBias ScoreFunction SoftCap register_score_function
"""


def test_public_names() -> None:
    assert sorted(attnops.__all__) == sorted(PUBLIC.split())
    assert len(PUBLIC.split()) <= 50
    for name in PUBLIC.split():
        assert getattr(attnops, name) is not None
    for name in authoring.__all__:
        assert getattr(authoring, name) is not None


def test_every_file_that_names_a_version_names_this_one() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert attnops.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert first.startswith(f"## [{version}] - ")


CORE = runpy.run_path(str(ROOT / "packaging" / "distributions.py"))["core_pyproject"]


def test_attnops_core_is_attnops_without_eformer() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = tomllib.loads(text)
    (eformer,) = [one for one in wanted["project"]["dependencies"] if one.startswith("eformer")]
    wanted["project"]["dependencies"].remove(eformer)
    wanted["project"]["name"] = "attnops-core"
    assert tomllib.loads(CORE(text)) == wanted


@pytest.mark.parametrize(("old", "new"), [('"eformer>=', '"ray>='), ('name = "attnops"', 'name = "other"')])
def test_a_pyproject_of_another_form_is_refused(old: str, new: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(SystemExit, match="has 0 lines like"):
        CORE(text.replace(old, new))
