"""`attnops certify`: its exit status, what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnops.certify import Certificate, built_in_conventions, convention_named
from attnops.certify.badge import badge
from attnops.certify.cases import alone, inexpressible, paired
from attnops.certify.families import family_of
from attnops.certify.features import FEATURES
from attnops.certify.page import certificate_page
from attnops.certify.source import Subject, script
from attnops.certify.targets import rivals, subject_named
from attnops.cli.app import main

HERE = Path(__file__).resolve().parent


def test_a_wrong_function_ends_with_1_and_its_files_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HERE)
    html, svg = tmp_path / "a.html", tmp_path / "a.svg"
    command = [
        "certify",
        "planted:cap_ignored",
        "--as",
        "planted.toml",
        "--feature",
        "soft_cap",
        "--feature",
        "scale",
        "--quick",
    ]
    status = main([*command, "--json", "--cases", "0", "--html", str(html), "--badge", str(svg)])
    data = json.loads(capsys.readouterr().out)
    assert status == 1
    certificate = Certificate.from_dict(data)
    assert {one.feature: one.verdict for one in certificate.features if one.verdict in ("right", "wrong")} == {
        "plain": "right", "scale": "right", "soft_cap": "wrong",
    }  # fmt: skip
    assert certificate.wrong_cases[0].script.splitlines()[2] == "from planted import cap_ignored as f"
    assert html.read_text() == certificate_page(certificate)
    assert "http" not in html.read_text()
    assert svg.read_text() == badge(certificate)
    texts = [one.text for one in ElementTree.fromstring(svg.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["attention", "2 right, 1 wrong"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["spalsh"], "Did you mean"),
        (["planted:attend"], "--as"),
        (["planted:attend", "--as", "flaks"], "Did you mean 'flax'?"),
        (["planted:attend", "--as", "missing.toml"], "missing.toml"),
        (["nomodule:f", "--as", "jax.nn"], "nomodule"),
        (["vanilla", "--feature", "windw"], "Did you mean 'window'?"),
        (["paged", "--feature", "gradient"], "of family pages"),
        (["vanilla", "--as", "jax.nn"], "own convention"),
        (["vanilla.forward_tpu"], "forward_native"),
        (["multi_latent_ragged_page_attention_v1"], "--feature latent"),
        (["latent.spalsh"], "Did you mean 'splash'?"),
        (["splash.forward_rocm"], "forward_rocm"),
        (["x.:y", "--as", "jax.nn"], "module:function"),
        (["vanilla", "--html", "/no/such/folder/a.html"], "not a folder"),
        (["planted:", "--as", "jax.nn"], "module:function"),
        (["vanilla", "--badge", "/"], "is a folder"),
        (["--as", "jax.nn"], "no target"),
        (["planted:number", "--as", "jax.nn"], "int is no function"),
        (["planted:refuses_everything", "--as", "jax.nn", "--feature", "scale", "--quick"], "dims of 128 are wanted"),
    ],
)
def test_bad_usage_ends_with_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HERE)
    assert main(["certify", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_printed_case_is_pasted_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten lines, none of which is broken at the width of the console."""
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", "40")
    command = ["certify", "planted:scale_ignored", "--as", "planted.toml", "--feature", "scale", "--cases", "0"]
    assert main(command) == 1
    printed = capsys.readouterr().out
    pasted = printed[printed.index("import jax") :]
    pasted = pasted[: pasted.index(".max())") + len(".max())")]
    assert len(pasted.splitlines()) == 10
    told: dict[str, object] = {}
    exec(compile(pasted, "<script>", "exec"), told)
    (got,), (want,) = told["got"], told["want"]
    assert abs(got - want).max() > 1e-3
    assert "window" not in printed  # it wasn't asked for


def test_a_library_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["certify", "keras"]) == 2
    assert "pip install keras" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("causal = ", "TOML"),
        ('cuasal = "is_causal"', "cuasal"),
        ('mask_means = "maybe"', "mask_means"),
        ('call = "{f}({q}, {k}, {v}, nope)"', "nope"),
        ('call = "{f}({q}, {k}"', "does not match opening parenthesis"),
    ],
)
def test_a_convention_that_makes_no_call_is_refused(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.toml").write_text(text)
    monkeypatch.chdir(HERE)
    command = ["certify", "planted:attend", "--as", str(tmp_path / "planted.toml"), "--quick", "--feature", "scale"]
    assert main(command) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [n for n in built_in_conventions() if convention_named(n).family == "attention"])
def test_every_case_of_every_convention_is_python(name: str) -> None:
    convention = convention_named(name)
    subject = Subject(name, convention, ("from library import f",))
    features = [one for one in FEATURES if inexpressible(one, convention) is None]
    cases = [case for _, case in alone(convention, features, 0, quick=False)] + paired(convention, features, 0, 20)
    assert len(cases) > 20
    for case in cases:
        text = script(case, subject, "a case")
        compile(text, name, "exec")
        for placeholder in ("{terms}", "{arguments}", "{options}", "{left}", "{q}", "{bias}", "{segments}", "{heads}"):
            assert placeholder not in text


TARGETS = ("paged", "unified_attention", "latent", "indexer", "paged_indexer", "selected", "kda", "ragged_mamba2")


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_of_a_target_is_python(name: str) -> None:
    subject = subject_named(name)
    family = family_of(subject)
    features = [one for one in family.features if family.inexpressible(one) is None]
    cases = [case for _, case in family.alone(features, 0, False)] + family.paired(features, 0, 30)
    assert len(cases) > 40
    for case in cases:
        text = family.script(case, "a case")
        compile(text, name, "exec")
        assert not re.search(r"\{(arguments|options|left|dim|tokens|k_new|layout)\}", text)
        assert all(
            len(family.features_of(smaller)) <= len(family.features_of(case)) for smaller in family.smaller(case)
        )


def test_rivals_have_a_package_and_a_function() -> None:
    for name in rivals():
        convention = convention_named(name)
        assert convention.package
        assert convention.about
    assert subject_named("jax.nn").define == ("from jax.nn import dot_product_attention as f",)


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify"]) == 0
    printed = capsys.readouterr().out
    assert all(one.name in printed for one in FEATURES)
    assert all(name in printed for name in ("torch", "maxtext", "ejkernel"))
    for target in TARGETS:
        subject = subject_named(target)
        listed = printed[printed.index(f"of {subject.convention.family}") :]
        assert all(f"{one.name}:" in listed for one in family_of(subject).features)


_EVERY_CASE = """
import hashlib
from attnops.certify.families import family_of
from attnops.certify.targets import subject_named
for name in {targets!r}:
    family = family_of(subject_named(name))
    features = [one for one in family.features if family.inexpressible(one) is None]
    cases = [case for _, case in family.alone(features, 7, False)] + family.paired(features, 7, 40)
    texts = [family.script(case, name) for case in cases] + [repr(list(family.smaller(case))) for case in cases]
    print(name, len(cases), hashlib.sha256("".join(texts).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_cases_of_a_seed_are_the_same_in_every_process() -> None:
    """In which sets have another order."""
    program = _EVERY_CASE.format(targets=("vanilla", *TARGETS))
    path = os.pathsep.join(sys.path)
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    (lines,) = printed
    assert len(lines.splitlines()) == 1 + len(TARGETS)
