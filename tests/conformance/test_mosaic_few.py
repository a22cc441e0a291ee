"""Few queries in Mosaic GPU: heads folded into rows, the keys in parts. In the interpreter, which looks for races."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from attnops import Causal, Chunked, SlidingWindow
from attnops.operators.kernels.local_mask import Dropout, dropout_seed
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

from . import cases, harness
from .span_cases import segments

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: the interpreter of {JAX_NEEDED} looks for races", allow_module_level=True)

SLOW = pytest.mark.slow
FEW = cases.Sizes(batch=1, heads=4, kv_heads=2, length=150)
SIZES = {"block_kv": 64, "num_stages": 2}
WAYS = {
    "folded": {"fold": True, **SIZES},
    "split": {"fold": False, "kv_splits": 2, **SIZES},
    "folded_split": {"fold": True, "kv_splits": 3, **SIZES, "num_stages": 1},
    "more_parts_than_tiles": {"fold": True, "kv_splits": 5, **SIZES},
}
BUILT = {
    n: cases.build(n, "bthd", FEW) for n in cases.names() if n != "mask_function"
}  # its function counts from the row's index
NAMES = [
    (generation, n)
    for generation, kernel in harness.MOSAIC.items()
    for n, c in BUILT.items()
    if c.q_len in (*range(6), FEW.length) and c.features <= kernel.capability.consumes
]
GENERATIONS = pytest.mark.parametrize("generation", harness.MOSAIC)
LAYOUTS = ("bthd", "bhtd")


def _few(name: str, layout: str, rows: int = 5) -> cases.Case:
    """The last rows of a case, with fewer kv heads; some have as few rows already."""
    case = cases.build(name, layout, FEW)
    if case.kv_heads == case.heads and not case.scales:
        case = replace(case, kv_heads=FEW.kv_heads)
    return case if case.q_len <= rows else cases.last_rows(case, rows)


def _make(generation: str, config: dict[str, Any], dtype: str) -> Any:
    kernel = harness.MOSAIC[generation]
    asked = {name: x for name, x in (kernel.config or {}).items() if name in ("interpret", "kernel")}
    return kernel._replace(config={**asked, **config}).make(dtype)


def _check(
    generation: str,
    config: dict[str, Any],
    case: cases.Case,
    dtype: str = "bfloat16",
    layout: str = "bthd",
    dim: int = 32,
) -> Any:
    attend = _make(generation, config, dtype)
    tensors = harness.draw(case, dtype, dim)
    plan = attend.plan(*harness.handed_over(case, tensors, dtype, layout), layout=layout, **case.call)
    assert plan.method == f"forward_{generation}", plan.rejected
    assert {n: getattr(plan.config, n) for n in config} == config
    got = harness.run(attend, case, tensors, dtype, layout)
    published = harness.MOSAIC[generation].capability.tolerance[dtype]
    harness.agree(got, harness.expect(case, tensors, dim), published.forward, published.backward)
    return plan.config


@SLOW
@pytest.mark.parametrize(
    ("generation", "name", "way", "layout"),
    [(*which, list(WAYS)[number % len(WAYS)], LAYOUTS[number // 2 % 2]) for number, which in enumerate(NAMES)],
)
def test_few_queries(generation: str, name: str, way: str, layout: str) -> None:
    _check(generation, WAYS[way], _few(name, layout), layout=layout)


@SLOW
@pytest.mark.parametrize("name", ["causal_window", "sinks", "bias", "dense_mask", "forgetting"])
@pytest.mark.parametrize(("generation", "block_q"), [("hopper", 128), ("blackwell", 128), ("blackwell", 256)])
def test_folded_rows_of_several_warpgroups(generation: str, block_q: int, name: str) -> None:
    """40 queries of four heads are 160 rows: a warpgroup's are of several heads."""
    case = replace(_few(name, "bthd", 40), kv_heads=1)
    _check(generation, {"fold": True, "kv_splits": 2, "block_q": block_q, "block_kv": 64, "num_stages": 2}, case)


@SLOW
@GENERATIONS
@pytest.mark.parametrize("config", [{}, {"kv_splits": 2}])
def test_one_query_with_every_default(generation: str, config: dict[str, Any]) -> None:
    """Decoding: the key's length is that of the row."""
    chosen = _check(generation, config, _few("kv_lengths", "bthd", 1), "float16", dim=64)
    assert chosen.fold
    assert (chosen.block_q, chosen.block_kv) == {"hopper": (64, 64), "blackwell": (128, 128)}[generation]


@SLOW
@GENERATIONS
def test_dropout_is_the_same_everywhere(generation: str) -> None:
    """A weight that another path keeps, or drops, changes its row by far more than the tolerance."""
    case, probability = _few("causal_window", "bthd", 6), 0.3
    key = jax.random.key(3)
    of_all = Dropout(dropout_seed(key), probability, 0, 0, 0)
    keep = np.asarray(of_all.keep_all(case.batch, case.heads, case.q_len, slice(0, case.kv_len)))
    case.call |= {"dropout_prob": probability, "deterministic": False, "dropout_rng": key}
    case.reference |= {"keep": keep, "keep_probability": 1 - probability}
    _check(generation, WAYS["folded_split"], case)


@SLOW
@GENERATIONS
def test_hidden_keys_may_hold_anything(generation: str) -> None:
    case = replace(cases.build("causal", "bthd", FEW), kv_heads=2)
    seen = case.mask[..., 100:105, :]
    case = replace(case, call={"mask": Causal(), "query_offset": 100}, mask=seen, q_len=5)
    attend = _make(generation, WAYS["folded_split"], "bfloat16")
    tensors = harness.draw(case, "bfloat16", 32)
    want = harness.expect(case, tensors, 32)
    key, value = tensors.key.copy(), tensors.value.copy()
    key[:, 105:], value[:, 105:] = np.nan, np.inf
    got = harness.run(attend, case, tensors._replace(key=key, value=value), "bfloat16", "bthd")
    published = harness.MOSAIC[generation].capability.tolerance["bfloat16"]
    harness.agree(got, want, published.forward, published.backward)


HEADS = 4, 2
SPANS = {
    "in_order": segments(["padded"], [Causal()], q_len=5, offsets=113, heads=HEADS),
    "each": segments(["unordered", "rising"], [Causal()], q_len=5, offsets=[145, 70], heads=HEADS),
    "window": segments(["rising", "unordered"], [SlidingWindow(50, 3)], q_len=7, offsets=140, lengths=[150, 143], heads=HEADS),
    "chunks": segments(["long", "unordered"], [Causal(), Chunked(48)], q_len=3, offsets=[147, -1], heads=(4, 1), return_lse=True),
    "one_query": segments(["unordered", "padded"], q_len=1, offsets=[149, 40], lengths=[150, 41], heads=HEADS),
}  # fmt: skip
SPANS_IN_WAYS = [
    (name, list(WAYS)[(number + more) % len(WAYS)]) for number, name in enumerate(SPANS) for more in (0, 2)
]


@SLOW
@GENERATIONS
@pytest.mark.parametrize(("name", "way"), SPANS_IN_WAYS)
def test_spans(generation: str, name: str, way: str) -> None:
    """Segment ids in order, and out of order, beside other parts of a mask."""
    _check(generation, WAYS[way], SPANS[name])


@SLOW
@pytest.mark.parametrize(("generation", "block_q"), [("hopper", 128), ("blackwell", 128), ("blackwell", 256)])
def test_spans_of_several_warpgroups(generation: str, block_q: int) -> None:
    case = segments(["unordered", "rising"], [Causal(), Chunked(48)], q_len=40, offsets=[110, 20], heads=(4, 1))
    _check(generation, {"fold": True, "kv_splits": 2, "block_q": block_q, "block_kv": 64, "num_stages": 2}, case)
