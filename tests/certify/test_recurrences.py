"""Certificates of recurrent operations: nothing is wrong, and what is planted is found."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import jax
import pytest

from attnops import OperationRegistry
from attnops.certify import Certificate, certify
from attnops.certify.families import family_of, runner_of
from attnops.certify.features import Feature
from attnops.certify.targets import subject_named

REQUIRED = {
    "kda": {"decay", "beta", "initial_state", "segment_ids", "lengths"},
    "causal_conv1d": {"bias", "initial_state", "segment_ids", "lengths"},
}


def _certified(name: str, **more: Any) -> Certificate:
    subject = subject_named(name)
    return certify(subject, runner_of(subject), family=family_of(subject), **more)


def _features(name: str) -> tuple[Feature, ...]:
    return family_of(subject_named(name)).features


@pytest.mark.parametrize("name", REQUIRED)
def test_nothing_is_wrong(name: str) -> None:
    factors = ("decay", "beta", "bias", "initial_state", "segment_ids", "lengths", "gradient", "tokens")
    features = [one for one in _features(name) if one.factor in factors and one.level != "chunks"]
    certificate = _certified(name, features=features, quick=True, pairs=2)
    found = {one.feature: one.verdict for one in certificate.features}
    assert {one for one, verdict in found.items() if verdict == "right"} == {
        "plain", "gradient", "tokens.odd", "tokens.one", *REQUIRED[name],
    }  # fmt: skip
    assert not certificate.wrong


def test_an_operation_that_ignores_its_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OperationRegistry.get("simple_gla")
    call = operation.__call__
    monkeypatch.setattr(
        operation, "__call__", lambda self, *a, **more: call(self, *a, **{**more, "initial_state": None})
    )
    features = [one for one in _features("simple_gla") if one.name in ("initial_state", "decay", "heads.gqa")]
    certificate = _certified("simple_gla", features=features)
    (case,) = certificate.wrong_cases
    assert case.features == ("initial_state",)
    assert {one.feature for one in certificate.features if one.verdict == "right"} == {"plain", "decay", "heads.gqa"}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(case.script, "<script>", "exec"), {})
    assert float(out.getvalue().splitlines()[0].split("is wrong by ")[1]) > 1e-3


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @jax.custom_vjp
    def half(x: Any) -> Any:
        return x

    half.defvjp(lambda x: (x, None), lambda _, d: (d / 2,))
    operation = OperationRegistry.get("simple_gla")
    call = operation.__call__
    monkeypatch.setattr(
        operation, "__call__", lambda self, *a, **more: call(self, *a, **{**more, "value": half(more["value"])})
    )
    features = [one for one in _features("simple_gla") if one.name == "gradient"]
    (case,) = _certified("simple_gla", features=features).wrong_cases
    assert case.features == ("gradient",)
    assert case.what.startswith("gradient of value is wrong")
