"""Pages, latents, indexers and recurrences over slots: what is planted is found, and what is right has nothing wrong."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted_calls
import pytest

from attnops import OperationRegistry
from attnops.certify import Certificate, certify, convention_named
from attnops.certify.calls import KINDS
from attnops.certify.families import family_of, runner_of
from attnops.certify.forced import only
from attnops.certify.source import Subject
from attnops.certify.suite import chosen_features
from attnops.certify.targets import subject_named
from attnops.verify.selection_error import index_reference

HERE = Path(__file__).resolve().parent
CONVENTIONS = {name: convention_named(str(HERE / f"planted_{name}.toml")) for name in ("pages", "latent", "indexer")}
OF = {"pages": "over_pages", "latent": "latent", "indexer": "indexer"}


def _subject(family: str, name: str) -> Subject:
    return Subject(f"planted_calls:{name}", CONVENTIONS[family], (f"from planted_calls import {name} as f",))


def _certified(subject: Subject, *features: str, **more: Any) -> Certificate:
    family = family_of(subject)
    chosen = chosen_features(features, family.features)
    return certify(subject, runner_of(subject), family=family, features=chosen, **more)


def _printed(script: str) -> dict[str, float]:
    if "jax_num_cpu_devices" in script:  # before jax starts
        environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join((str(HERE), *sys.path))}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, text=True, stdout=subprocess.PIPE, check=True
        )
        printed = ran.stdout
    else:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(script, "<script>", "exec"), {})
        printed = out.getvalue()
    lines = [line.split(" is wrong by ") for line in printed.splitlines()]
    return {name: float(number) for name, number in lines}


PLANTED = [
    ("pages", "pages_window", ("window.left", "sinks"), {"window.left"}),
    ("pages", "pages_scale", ("scale", "heads.gqa"), {"scale"}),
    ("pages", "pages_sinks", ("sinks", "scale"), {"sinks"}),
    ("pages", "pages_order", ("page", "rows.decode"), {"plain", "page", "rows.decode"}),
    ("pages", "pages_length", ("rows.prefill", "rows.full"), {"plain", "rows.prefill", "rows.full"}),
    ("pages", "pages_position", ("rows.prefill", "window.left"), {"plain", "window.left"}),
    ("pages", "pages_of_nobody", ("unused.tokens", "unused.rows"), {"unused.tokens"}),
    ("pages", "pages_in_a_mesh", ("transform.vmap", "transform.shard_map"), {"transform.shard_map"}),
    ("pages", "pages_maximum", ("values", "scale"), {"values.large"}),
    ("latent", "latent_maximum", ("values", "heads.one"), {"values.large"}),
    ("latent", "latent_window", ("window.left", "lengths"), {"window.left"}),
    ("latent", "latent_scale", ("scale",), {"plain"}),
    ("latent", "latent_rotary", ("heads.one",), {"plain", "heads.one"}),
    ("latent", "latent_gradient", ("gradient", "heads.one"), {"gradient"}),
    ("indexer", "indexer_relu", ("lengths",), {"plain"}),
    ("indexer", "indexer_ties", ("ties", "scale"), {"ties"}),
    ("indexer", "indexer_window", ("window.left", "scale"), {"window.left"}),
    ("indexer", "indexer_counts", ("top_k.one",), {"plain", "top_k.one"}),
]


@pytest.mark.parametrize(("family", "name", "features", "wrong"), PLANTED, ids=[row[1] for row in PLANTED])
def test_what_is_planted_is_found(family: str, name: str, features: tuple[str, ...], wrong: set[str]) -> None:
    certificate = _certified(_subject(family, name), *features, quick=True)
    found = {one.feature for one in certificate.features if one.verdict == "wrong"}
    assert found >= wrong
    if "plain" not in wrong:
        assert found == wrong
        assert {one.feature for one in certificate.features if one.verdict == "right"} >= {"plain"}
    if family != "indexer":  # whose selections attnops compares
        assert "attnops" not in certificate.wrong_cases[0].script
    errors = _printed(certificate.wrong_cases[0].script)
    assert not max(errors.values()) < 1e-3  # or NaN


SOME = {
    "pages": ("rows", "unused", "window", "selected", "heads.mqa", "lse"),
    "latent": ("window.left", "offset.rows", "lengths.zero", "dims.odd", "gradient"),
    "indexer": ("window.left", "offset.rows", "lengths.zero", "top_k", "ties", "dtype.bfloat16"),
}


@pytest.mark.parametrize("family", SOME)
def test_a_right_function_has_nothing_wrong(family: str) -> None:
    certificate = _certified(_subject(family, OF[family]), *SOME[family], pairs=2, quick=True)
    verdicts = {one.verdict for one in certificate.features}
    assert verdicts <= {"right", "not tried", "not expressible"}, [one for one in certificate.features if one.why]
    assert certificate.family == family
    assert Certificate.from_dict(certificate.to_dict()) == certificate


def test_an_operation_that_ignores_the_states_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OperationRegistry.get("ragged_simple_gla")
    call = operation.__call__

    def fresh(self: Any, *arrays: Any, **more: Any) -> Any:
        return call(self, *arrays, **{**more, "state": more["state"] * 0})

    monkeypatch.setattr(operation, "__call__", fresh)
    subject = subject_named("ragged_simple_gla")
    certificate = _certified(subject, "rows.prefill", "rows.decode", quick=True)
    verdicts = {one.feature: one.verdict for one in certificate.features}
    assert (verdicts["plain"], verdicts["rows.decode"]) == ("wrong", "wrong")
    assert max(_printed(certificate.wrong_cases[0].script).values()) > 1e-3


@pytest.mark.slow
def test_a_step_that_drops_its_sinks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OperationRegistry.get("paged")
    call = operation.__call__
    monkeypatch.setattr(
        operation,
        "__call__",
        lambda self, *a, **more: call(self, *a, **{n: x for n, x in more.items() if n != "softmax_aux"}),
    )
    certificate = _certified(subject_named("paged"), "sinks", "scale", quick=True)
    verdicts = {one.feature: one.verdict for one in certificate.features}
    assert (verdicts["plain"], verdicts["sinks"], verdicts["scale"]) == ("right", "wrong", "right")
    (case,) = certificate.wrong_cases
    assert case.features == ("sinks",)


@pytest.mark.parametrize("name", ["paged", "latent", "indexer", "paged_indexer", "selected", "ragged_kda"])
def test_nothing_of_attnops_is_wrong(name: str) -> None:
    chosen = {
        "paged": ("latent", "spans", "update.fused"),
        "latent": ("queries", "gradient"),
        "ragged_kda": ("drafts", "slots", "conv", "conv_activation"),
    }
    others = {
        "selected": ("unused", "gradient"),
        "indexer": ("ties", "offset"),
        "paged_indexer": ("ties", "rows.empty"),
    }
    certificate = _certified(subject_named(name), *(chosen | others)[name], quick=True)
    assert {one.verdict for one in certificate.features} <= {"right", "not tried", "not expressible"}


def test_arrays_are_arguments_of_the_program() -> None:
    """Of constants under vmap, XLA on CPUs folds a gather of float16 wrongly (openxla/xla#34260)."""
    run = runner_of(subject_named("paged"))
    levels = {"dtype": "float16", "transform": "vmap"}
    assert run(KINDS["pages"].case(levels, 0)).verdict == "right"


def test_what_rounding_makes_of_a_gradient_of_zero_is_not_wrong() -> None:
    """Of a query that sees one key."""
    case = KINDS["selected"].case({"gradient": "yes"}, 0)
    sizes = {"batch": 1, "q_len": 2, "kv_len": 2, "kv_heads": 1, "selected": 1}
    judgement = runner_of(subject_named("selected"))(replace(case, sizes=case.sizes | sizes))
    assert judgement.verdict == "right", judgement


def test_equal_scores_of_whole_numbers_are_equal_in_the_reference() -> None:
    """Whose order the positions then follow: one head of 3 says as much as heads of 1 and 2, at a scale that rounds."""
    query, weights = np.ones((1, 2, 8)), np.ones((1, 2))
    key = np.zeros((4, 8))
    key[0, :3], key[1, 5:], key[2, [0, 3, 6]] = 1, 1, 1
    key[3] = [1, 1, 1, 1, -1, 0, 0, 0]
    query[:, 1] = [1, -1, 1, -1, 1, -1, 1, -1]
    scores, _ = index_reference(query, key, weights, 8**-0.5)
    exact = np.maximum(query[0] @ key.T, 0).sum(0)
    for one in range(4):
        for other in range(4):
            assert (scores[0, one] == scores[0, other]) == (exact[one] == exact[other])


def test_a_refusal_of_attnops_is_told_with_its_reasons() -> None:
    certificate = _certified(subject_named("sdpa"), "soft_cap", "scale", quick=True)
    told = {one.feature: one for one in certificate.features}
    assert told["scale"].verdict == "right"
    assert told["soft_cap"].verdict == "refused"
    assert "[feature.logits_soft_cap]" in told["soft_cap"].why
    assert "batch" not in told["soft_cap"].why  # of the one case that was tried first


def test_a_method_that_does_not_run_is_refused() -> None:
    subject = subject_named("indexer")
    run = runner_of(subject, only("forward_tpu", OperationRegistry.create("indexer")))
    judgement = run(KINDS["indexer"].case({}, 0))
    assert judgement == ("refused", "RefusedError: forward_native runs in the place of forward_tpu", 0.0)
    define = subject_named("kda.forward_tpu").define
    assert define[-1] == 'f = only("forward_tpu", f)'


assert planted_calls  # imported by the scripts
