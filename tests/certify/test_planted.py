"""What is planted is found: under the right feature, with a small case that a script shows."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock

import planted
import pytest

from attnops.certify import Certificate, certify, convention_named, worker
from attnops.certify.case import Case, made
from attnops.certify.features import FEATURES, Feature, default_levels
from attnops.certify.judge import Judgement
from attnops.certify.run_case import CaseRunner
from attnops.certify.source import Subject
from attnops.certify.worker import Workers

HERE = Path(__file__).resolve().parent
CONVENTION = convention_named(str(HERE / "planted.toml"))


def _subject(name: str) -> Subject:
    return Subject(f"planted:{name}", CONVENTION, (f"from planted import {name} as f",))


def _features(*names: str) -> tuple[Feature, ...]:
    return tuple(one for one in FEATURES if one.name in names or one.factor in names)


def _certified(name: str, *features: str, **more: object) -> Certificate:
    subject = _subject(name)
    return certify(subject, CaseRunner(subject), features=_features(*features), **more)


def _printed(script: str) -> dict[str, float]:
    """What a script says: the error of each part."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(script, "<script>", "exec"), {})
    return {
        line.split(" is wrong by ")[0]: float(line.split(" is wrong by ")[1]) for line in out.getvalue().splitlines()
    }


PLANTED = [
    ("window_off_by_one", ("window", "causal"), {"window.left", "window.both", "window.open"}),
    ("mask_added", ("mask", "lengths"), {"mask.padding", "mask.dense", "mask.dead"}),
    ("segments_ignored", ("segments", "causal"), {"segments", "segments.negative"}),
    ("head_order", ("heads", "scale"), {"heads.gqa", "heads.groups_of_3"}),
    ("dead_rows", ("mask", "lengths", "bias"), {"mask.dead", "lengths.zero", "bias.dead"}),
    ("scale_ignored", ("scale", "heads"), {"scale"}),
    ("causal_at_the_start", ("causal",), {"causal.end", "causal.offset"}),
    ("cap_ignored", ("soft_cap", "scale"), {"soft_cap"}),
]


@pytest.mark.parametrize(("name", "features", "wrong"), PLANTED, ids=[row[0] for row in PLANTED])
def test_what_is_planted_is_found(name: str, features: tuple[str, ...], wrong: set[str]) -> None:
    certificate = _certified(name, *features, quick=True)
    found = {one.feature: one.verdict for one in certificate.features}
    asked = {one.name for one in _features(*features)}
    assert {one for one in asked if found[one] == "wrong"} == wrong
    assert {one for one in asked if found[one] == "right"} == asked - wrong
    assert found["plain"] == "right"
    for case in certificate.wrong_cases:
        assert wrong & set(case.features), case.features
        assert len(case.features) == 1, case.features
        assert max(_printed(case.script).values()) > 1e-3 or "nan" in str(_printed(case.script))
        assert len(case.script.splitlines()) <= 17
    assert len({case.script for case in certificate.wrong_cases}) == len(certificate.wrong_cases)


def test_a_missing_scale_is_wrong_in_plain_attention() -> None:
    certificate = _certified("no_scale", "scale", quick=True)
    assert certificate.features[0].verdict == "wrong"
    assert certificate.wrong_cases[0].features == ("plain",)
    assert _printed(certificate.wrong_cases[0].script)["output"] > 1e-3


def test_a_wrong_gradient_is_found() -> None:
    certificate = _certified("wrong_gradient", "gradient", "window.left", "scale")
    assert {one.feature: one.verdict for one in certificate.features}["gradient"] == "wrong"
    (case,) = certificate.wrong_cases
    assert case.features == ("gradient",)
    assert "gradient of k" in case.what
    errors = _printed(case.script)
    assert errors["gradient of k"] > 1e-3
    assert max(errors["output"], errors["gradient of q"], errors["gradient of v"]) < 1e-5


@pytest.mark.slow
def test_what_is_wrong_only_together_is_found_and_made_small() -> None:
    certificate = _certified("wrong_together", "soft_cap", "causal", "bias", "heads.gqa", "dtype", pairs=30, seed=2)
    verdicts = {one.feature: one.verdict for one in certificate.features}
    assert verdicts["soft_cap"] == "wrong"
    assert verdicts["bias"] == verdicts["heads.gqa"] == verdicts["dtype.bfloat16"] == "right"
    for case in certificate.wrong_cases:
        assert "soft_cap" in case.features
        assert len(case.features) <= 3  # fewer queries than keys come with their alignment
        assert _printed(case.script)["output"] > 1e-3


def test_a_refusal_is_told_with_its_message() -> None:
    certificate = _certified("refuses_windows", "window", "scale", quick=True)
    told = {one.feature: one for one in certificate.features}
    assert told["window.left"].verdict == "refused"
    assert "NotImplementedError: no window, got (2, 0)" in told["window.left"].why
    assert told["scale"].verdict == "right"
    assert not certificate.wrong


def test_what_is_refused_only_together_is_told() -> None:
    certificate = _certified("refuses_windows_with_bias", "window.left", "bias", "scale", pairs=20)
    assert {one.verdict for one in certificate.features} == {"right", "not tried"}
    ((names, why),) = certificate.refusals
    assert "window.left" in names
    assert "bias" in names
    assert "a window or a bias" in why


@pytest.mark.slow
def test_a_right_function_has_nothing_wrong() -> None:
    subject = _subject("attend")
    certificate = certify(subject, CaseRunner(subject), pairs=6, seed=1, quick=True)
    expressible = [one for one in certificate.features if one.verdict != "not expressible"]
    assert {one.verdict for one in expressible} == {"right"}
    assert {one.feature for one in certificate.features} - {one.feature for one in expressible} == {
        "layout.bhtd",
        "layout.thd",
    }
    assert Certificate.from_dict(certificate.to_dict()) == certificate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_rounding_and_underflow_make_is_not_wrong(dtype: str) -> None:
    """Of logits of thousands most weights are 0 in any dtype, and the gradient of such a key is what is left of a tiny number."""
    run = CaseRunner(Subject("planted", CONVENTION, ()), planted.attend)
    for seed in range(6):
        levels = default_levels() | {"values": "large", "gradient": "yes", "dtype": dtype}
        assert run(made(levels, seed)).verdict == "right", (dtype, seed)
        capped = made(levels | {"soft_cap": "yes", "scale": "yes"}, seed)
        assert run(capped).verdict == "right", (dtype, seed)
    if dtype == "float32":
        assert run(made(levels | {"values": "denormal"}, 1)).verdict == "right"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_certificate() -> None:
    one, other, third = (_certified("wrong_together", "soft_cap", "causal", pairs=4, seed=seed) for seed in (3, 3, 4))
    assert one == other
    assert one.seed != third.seed


def _in_worker(name: str, monkeypatch: pytest.MonkeyPatch, seconds: float, *features: str) -> Certificate:
    monkeypatch.chdir(HERE)
    with Workers(_subject(name), seconds) as workers:
        together = len(workers.each)
        return certify(_subject(name), workers, features=_features(*features), quick=True, together=together)


def test_cases_judged_at_once_give_the_same_certificate() -> None:
    """Whichever of two ends first."""
    subject, features = _subject("wrong_together"), _features("soft_cap", "causal", "scale")
    run, one_at_a_time = CaseRunner(subject), Lock()
    begun, ended, at_once = list[Case](), list[Case](), list[int]()

    def judged(case: Case) -> Judgement:
        begun.append(case)
        at_once.append(len(begun) - len(ended))
        time.sleep(0.05 * (len(begun) % 2))
        with one_at_a_time:
            result = run(case)
        ended.append(case)
        return result

    alone = certify(subject, run, features=features, pairs=4, quick=True)
    assert certify(subject, judged, features=features, pairs=4, quick=True, together=2) == alone
    assert max(at_once) >= 2


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        ("exits_with_scale", "wrong", "ended with status 3"),
        ("hangs_in_a_child_with_scale", "wrong", "no answer within 3 s"),
        ("reads_and_prints", "right", ""),
    ],
)
def test_the_process_of_a_case_is_ended_whole_and_is_its_own(
    name: str, verdict: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLANTED_PID", str(tmp_path / "pid"))
    certificate = _in_worker(name, monkeypatch, 3 if "hangs" in name else 60, "scale")
    assert {one.feature: one.verdict for one in certificate.features}["scale"] == verdict
    assert all(said in case.what for case in certificate.wrong_cases)
    if "hangs" in name:
        for pid in (tmp_path / "pid").read_text().split():
            assert _ended(int(pid)), pid


def _ended(pid: int) -> bool:
    """Whether a process has ended, or has nobody who would take note of it."""
    for _ in range(50):
        status = Path(f"/proc/{pid}/stat")
        try:
            os.kill(pid, 0)
            if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_a_crash_is_the_result_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = _in_worker("aborts_with_bias", monkeypatch, 60, "scale", "bias.broadcast", "soft_cap")
    verdicts = {one.feature: one.verdict for one in certificate.features}
    assert verdicts["bias.broadcast"] == "wrong"
    assert verdicts["scale"] == verdicts["soft_cap"] == "right"
    (case,) = certificate.wrong_cases
    assert "ended with signal 6" in case.what
    ran = subprocess.run([sys.executable, "-c", case.script], cwd=HERE, capture_output=True, env=_environment())
    assert ran.returncode == -6


def test_a_hang_is_the_result_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = _in_worker("hangs_with_sinks", monkeypatch, 3, "sinks", "scale")
    verdicts = {one.feature: one.verdict for one in certificate.features}
    assert (verdicts["sinks"], verdicts["scale"]) == ("wrong", "right")
    assert "no answer within 3 s" in certificate.wrong_cases[0].what


def test_waiting_for_a_cpu_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of a second, and a case of more, in all of which its threads had no CPU."""
    monkeypatch.setattr(worker, "_waited", lambda pid: {"1": time.monotonic()})
    certificate = _in_worker("takes_seconds_with_scale", monkeypatch, 1, "scale")
    assert {one.feature: one.verdict for one in certificate.features}["scale"] == "right"


def test_the_system_says_how_long_threads_waited() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("Linux alone says so")
    waited = worker._waited(os.getpid())
    assert str(os.getpid()) in waited
    assert all(seconds >= 0 for seconds in waited.values())


def _environment() -> dict[str, str]:
    """Without what the tests set: as somebody has it who pastes a script."""
    strict = ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION", "XLA_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in strict} | {"PYTHONPATH": str(HERE)}


def test_a_pasted_script_shows_the_error_without_attnops() -> None:
    certificate = _certified("window_off_by_one", "window.left", quick=True)
    (case,) = certificate.wrong_cases
    assert "attnops" not in case.script
    ran = subprocess.run(
        [sys.executable, "-c", case.script], cwd="/", capture_output=True, text=True, env=_environment()
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.split("output is wrong by ")[1]) > 1e-3


def test_scripts_expect_what_the_reference_says() -> None:
    """The NumPy of a script is written apart from the reference: on a right function, both find nothing."""
    from attnops.certify.cases import alone, inexpressible
    from attnops.certify.source import script

    subject = _subject("attend")
    features = [one for one in FEATURES if inexpressible(one, CONVENTION) is None]
    for one, case in alone(CONVENTION, features, 5, quick=True):
        if case.dtype == "float32" and case.levels["transform"] == "jit" and case.levels["values"] == "normal":
            errors = _printed(script(case, subject, "right"))
            assert max(errors.values()) < 1e-4, (one, errors)


assert planted  # imported by the scripts
