"""Every implementation x feature x layout x dtype, forward and gradient: what is declared agrees with the reference,
what isn't is refused before anything runs."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
from covering import covering

from attnops import RefusedError
from attnops.authoring import AttentionProblem
from attnops.operators.splash.external import EXTERNAL_FEATURES

from . import cases, harness

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("bthd", "bhtd", "thd")


def _refusal(
    implementation: harness.Implementation, case: cases.Case, dtype: str, problem: AttentionProblem
) -> set[str]:
    """Codes of the reasons that the declaration demands for this case; by hand for what attnops ships."""
    codes = {f"feature.{name}" for name in case.features - implementation.capability.consumes}
    if implementation.operation not in ("vanilla", "splash"):
        failing = (rule.check(problem, problem.config) for rule in implementation.capability.rules)
        codes |= {reason.code for reason in failing if reason is not None}
    if (implementation.config or {}).get("path") in (
        "blockwise",
        "decode",
        "decode_rows",
    ) and "return_weights" in case.features:
        codes |= {"vanilla.path"}
    if implementation.method == "forward_tpu" and implementation.operation == "splash":
        codes |= {"splash.one_query"} if case.q_len == 1 else set()
        codes |= {"splash.dtype"} if dtype == "float16" else set()
        if kernel := (implementation.config or {}).get("kernel"):
            missing = (case.features & implementation.capability.consumes) - EXTERNAL_FEATURES
            codes |= {f"splash.{kernel}.{feature}" for feature in missing}
            codes |= {f"splash.{kernel}.one_of_each"} if _segment_ids_twice(case) else set()
    return codes


def _segment_ids_twice(case: cases.Case) -> bool:
    """Beside a packed sequence's own, under a `|`."""
    return {"dynamic_or", "segment_ids"} <= case.features and "segment_ids" in str(case.call["mask"])


# What `make test` runs; in `make test-all` any three of implementation, case, dtype and layout meet. Every case runs in
# float32, whose tolerance notices most, in one layout, by turns. These, and some of the others by turns, run in half
# precision too: one in each.
IN_HALF = ("causal_window", "gqa")
HALVES = (
    ("bthd", "bfloat16"),
    ("bhtd", "float16"),
    ("thd", "bfloat16"),
    ("bthd", "float16"),
    ("bhtd", "bfloat16"),
    ("thd", "float16"),
)
# Kernels of others behind the same wrapping: for them these are enough.
_FEW = (*IN_HALF, "segment_ids", "kv_lengths", "sinks", "soft_cap")
FEW = {
    "splash.forward_tpu tokamax": _FEW,
    "splash.forward_tpu jax": _FEW,
    "flash_attn2.forward_cuda tokamax": (*_FEW, "bias"),
    "splash.forward_tpu pipelined": (
        "segment_ids",
        "bias",
        "int8_kv",
        "sinks",
    ),  # what lies along a tile's sides, or in it
}
# What an implementation has no code of its own for, or another case has too: each of these is tried in two of them.
SHARED = (
    "full",
    "causal",
    "causal_bottom_right",
    "window",
    "chunked",
    "chunked_power_of_two",
    "prefix",
    "negated",
    "mask_function",
    "segment_ids_unsorted",
    "positions",
    "dense_mask_and_causal",
    "dynamic_or",
    "dynamic_query_offset",  # of cache
    "bias_broadcast",
    "bias_of_minus_infinity",
    "soft_cap",  # of fp8_kv, as are value_dim and lse
    "value_dim",
    "lse",
    "sinks_several",
    "sinks_per_kv_head",
    "sinks_of_minus_infinity",
    "mqa",
    "cross",
    "int8_value",
    "fp8_key",
    "blocks",
    "chosen_blocks_or",
)
EVERY = sorted(harness.RUNNABLE)
OWN = [which for which in EVERY if which not in FEW]


def _often(which: str, name: str, layout: str, dtype: str) -> bool:
    if name not in FEW.get(which, (name,)):
        return False
    turn = cases.names().index(name) + EVERY.index(which)
    if name in SHARED and which in OWN and (SHARED.index(name) - OWN.index(which)) % len(OWN) > 1:
        return False
    if dtype == "float32":
        return layout == LAYOUTS[turn % len(LAYOUTS)]
    if name in IN_HALF and which not in FEW:
        return (layout, dtype) == HALVES[(3 * IN_HALF.index(name) + EVERY.index(which)) % len(HALVES)]
    return (name == IN_HALF[0] or turn % 12 == 0) and (layout, dtype) == HALVES[turn // 12 % len(HALVES)]


def _marks(which: str, name: str, layout: str, dtype: str) -> list[pytest.MarkDecorator]:
    slow = [] if _often(which, name, layout, dtype) else [pytest.mark.slow]
    return [*slow, *harness.needed(which)]


PRODUCT = [
    (which, name, layout, dtype)
    for name, dtype, layout, which in itertools.product(cases.names(), DTYPES, LAYOUTS, harness.RUNNABLE)
]
COMBINATIONS = [
    pytest.param(*row, marks=_marks(*row), id="-".join(row))
    for row in covering(PRODUCT, 3, [row for row in PRODUCT if _often(*row)])
]


@lru_cache(maxsize=4)  # the implementations follow one another
def _expected(name: str, dtype: str, packed: bool) -> harness.Result:
    case = cases.build(name, "thd" if packed else "bthd")
    return harness.expect(case, harness.draw(case, dtype))


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
    want = _expected(name, dtype, layout == "thd")
    if implementation.operation == "sdpa" and implementation.backend == "cuda" and (case.q_len % 2 or case.kv_len % 2):
        with pytest.raises(NotImplementedError):  # jax.nn has no gradient there; in mode train it is refused
            harness.run(attend, case, tensors, dtype, layout)
        output = harness.from_layout(attend(*qkv, layout=layout, **case.call).attention_outputs, layout)
        harness.agree(harness.Result(output, None, None, {}, dtype=dtype), want, published.forward, 0)
        return
    got = harness.run(attend, case, tensors, dtype, layout)
    harness.agree(got, want, published.forward, published.backward)
