"""Every implementation x feature x layout x dtype, forward and gradient: what is declared agrees with the reference,
what isn't is refused before anything runs."""

from __future__ import annotations

import itertools

import pytest

from attnops import AttentionProblem, RefusedError
from attnops.operators.splash_borrowed import BORROWED_FEATURES

from . import cases, harness

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("bthd", "bhtd", "thd")


def _refusal(
    implementation: harness.Implementation, case: cases.Case, dtype: str, problem: AttentionProblem
) -> set[str]:
    """Codes of the reasons that the declaration demands for this case; by hand for what attnops ships."""
    codes = {f"feature.{name}" for name in case.features - implementation.capability.consumes}
    if implementation.operation not in ("vanilla", "sdpa", "splash"):
        failing = (rule.check(problem, problem.config) for rule in implementation.capability.rules)
        codes |= {reason.code for reason in failing if reason is not None}
    if (implementation.config or {}).get("path") in ("blockwise", "decode") and "return_weights" in case.features:
        codes |= {"vanilla.path"}
    if implementation.method == "forward_tpu" and implementation.operation == "splash":
        codes |= {"splash.one_query"} if case.q_len == 1 else set()
        codes |= {"splash.dtype"} if dtype == "float16" else set()
        if kernel := (implementation.config or {}).get("kernel"):
            missing = (case.features & implementation.capability.consumes) - BORROWED_FEATURES
            codes |= {f"splash.{kernel}.{feature}" for feature in missing}
            codes |= {f"splash.{kernel}.one_of_each"} if _segment_ids_twice(case) else set()
    return codes


def _segment_ids_twice(case: cases.Case) -> bool:
    return {"dynamic_or", "segment_ids"} <= case.features


# Of forward_native's further paths and splash's kernels `make test` tries these in every layout and dtype, and every
# case in one of each.
OFTEN = ("causal_window", "segment_ids", "gqa")
# Kernels of others behind the same wrapping: for them these are enough in `make test`.
_FEW = (*OFTEN, "full", "chunked", "kv_lengths", "sinks", "soft_cap", "value_dim", "bias")
FEW = {"splash.forward_tpu tokamax": _FEW, "splash.forward_tpu jax": _FEW}
# Of the others: beside bthd in float32, in which every case is tried.
SOME = (
    *_FEW,
    "causal_bottom_right",
    "prefix",
    "dense_mask",
    "positions",
    "cache",
    "lse",
    "weights",
    "int8_kv",
    "fp8_kv",
)
# Variants of int8_kv and fp8_kv, which are tried in every way.
VARIANTS = ("int8_value", "fp8_key")
OFTEN_ONLY = {*harness.PATHS, *harness.KERNELS, "splash.forward_tpu"}


# The layouts and dtypes beside bthd in float32 that some cases are tried in: by turns, two each, so that each pair of them has
# cases of every kind.
TURNS = (
    (("bhtd", "float32"), ("bthd", "bfloat16")),
    (("thd", "float32"), ("bthd", "float16")),
    (("bhtd", "bfloat16"), ("thd", "float32")),
    (("thd", "bfloat16"), ("bhtd", "float16")),
)


def _often(which: str, name: str, layout: str, dtype: str) -> bool:
    """Every case in bthd and float32; some in other layouts and dtypes, too. The rest is for `make test-all`."""
    if name not in FEW.get(which, (name,)):
        return False
    if name in VARIANTS:
        return layout == "bthd" and dtype == "float32" and which in ("vanilla.forward_native", "splash.forward_tpu")
    if name not in (OFTEN if which in OFTEN_ONLY else SOME):
        return layout == "bthd" and dtype == "float32"
    if name in OFTEN:
        return layout == "bthd" or dtype == "float32"
    return (layout, dtype) in (("bthd", "float32"), *TURNS[SOME.index(name) % len(TURNS)])


def _marks(which: str, name: str, layout: str, dtype: str) -> list[pytest.MarkDecorator]:
    slow = [] if _often(which, name, layout, dtype) else [pytest.mark.slow]
    return [*slow, harness.NEEDS_TOKAMAX] if which.endswith(" tokamax") else slow


COMBINATIONS = [
    pytest.param(*key, marks=_marks(*key), id="-".join(key))
    for key in itertools.product(harness.RUNNABLE, cases.names(), LAYOUTS, DTYPES)
]


@pytest.mark.parametrize(("which", "name", "layout", "dtype"), COMBINATIONS)
def test_agrees_or_refuses(which: str, name: str, layout: str, dtype: str) -> None:
    implementation = harness.RUNNABLE[which]
    case = cases.build(name, layout)
    attend = implementation.make(dtype)
    tensors = harness.draw(case, dtype)
    qkv = harness.handed_over(case, tensors, dtype, layout)

    plan = attend.plan(*qkv, layout=layout, **case.call)
    assert plan.problem.features == case.features
    refusal = _refusal(implementation, case, dtype, plan.problem)
    if "splash.one_query" in refusal:  # forward_native's own cases hold what then runs against the reference
        assert (plan.kind, plan.method) == ("routed", "forward_native")
        assert {r.code for rejected in plan.rejected for r in rejected.reasons} == refusal
        return
    if refusal:
        assert plan.implementation is None
        assert {r.code for rejected in plan.rejected for r in rejected.reasons} - {"policy.fallback"} == refusal
        with pytest.raises(RefusedError):
            attend(*qkv, layout=layout, **case.call)
        return
    assert plan.implementation == f"{implementation.operation}.{implementation.method}"
    published = implementation.capability.tolerance[dtype]
    got = harness.run(attend, case, tensors, dtype, layout)
    harness.agree(got, harness.expect(case, tensors), published.forward, published.backward)
