"""A function that is called as a library's is certified by that convention: a right one is right, a wrong one is found."""

from __future__ import annotations

from pathlib import Path

import other_libraries
import pytest

from attnops.certify import Certificate, certify, convention_named
from attnops.certify.features import FEATURES
from attnops.certify.run_case import CaseRunner
from attnops.certify.source import Subject

HERE = Path(__file__).resolve().parent

# The convention, a function, the features that are asked for, and the one that is wrong in the other.
CONVENTIONS = [
    ("jax.nn", "jax_nn", ("causal", "causal.start", "window", "lengths", "mask.padding", "bias"), {"window.left", "window.both"}),
    ("tokamax", "tokamax", ("soft_cap", "scale", "causal"), {"soft_cap"}),
    ("flax", "flax", ("mask.padding", "segments", "heads.gqa"), {"mask.padding", "segments", "segments.negative"}),
    ("flash-attn", "flash_attn", ("causal.end", "causal", "alibi", "soft_cap", "window.open"), {"causal.end"}),
    ("torch", "torch_attention", ("mask.padding", "causal", "heads.gqa", "scale"), {"mask.padding"}),
    ("splash", "splash", ("causal.end", "window.left", "segments", "soft_cap"), {"segments", "segments.negative"}),
]  # fmt: skip


def _certified(convention: str, name: str, function: object, features: tuple[str, ...]) -> Certificate:
    subject = Subject(name, convention_named(convention), (f"from other_libraries import {name} as f",))
    asked = [one for one in FEATURES if one.name in features or one.factor in features]
    return certify(subject, CaseRunner(subject, function), features=asked, quick=True)


@pytest.mark.parametrize(("convention", "name", "features", "wrong"), CONVENTIONS, ids=[row[0] for row in CONVENTIONS])
def test_a_convention_judges_functions_of_its_kind(
    convention: str, name: str, features: tuple[str, ...], wrong: set[str]
) -> None:
    if convention in ("flax", "torch"):
        pytest.importorskip(convention)
    right = getattr(other_libraries, name)
    verdicts = {one.feature: one.verdict for one in _certified(convention, name, right, features).features}
    assert {name for name, verdict in verdicts.items() if verdict == "right"} >= {"plain", *wrong}
    assert "wrong" not in verdicts.values()
    assert "refused" not in verdicts.values()
    planted = _certified(convention, f"{name}_wrong", getattr(other_libraries, f"{name}_wrong"), features)
    assert {one.feature for one in planted.features if one.verdict == "wrong"} == wrong
    assert all("attnops" not in case.script for case in planted.wrong_cases)
