"""The kernels for GPUs with other sizes: parts of the keys, heads folded into rows, head dims that are no powers of two."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from covering import covering
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import Causal, Full, SlidingWindow
from attnops.operators.flash.kernel.flash_sizes import TileSteps

from . import cases, harness

FLASH = harness.RUNNABLE["flash_attn2.forward_cuda"]
SLOW = pytest.mark.slow


def _check(
    config: dict[str, Any], case: cases.Case, dtype: str = "float32", layout: str = "bthd", dim: int = 16
) -> None:
    attend = FLASH._replace(config={"interpret": not harness.ON_CUDA, **config}).make(dtype)
    tensors = harness.draw(case, dtype, dim)
    plan = attend.plan(*harness.handed_over(case, tensors, dtype, layout), layout=layout, **case.call)
    assert plan.implementation == "flash_attn2.forward_cuda"
    assert {n: getattr(plan.config, n) for n in config} == config
    got = harness.run(attend, case, tensors, dtype, layout)
    published = FLASH.capability.tolerance[dtype]
    harness.agree(got, harness.expect(case, tensors, dim), published.forward, published.backward)


# Few queries: those of a group folded into one tile, or not, the keys in one part or several.
FEW = cases.Sizes(batch=2, heads=4, kv_heads=2, length=150)
WAYS = {
    "folded": {"fold": True, "block_q": 32, "block_kv": 32},
    "split": {"fold": False, "kv_splits": 4, "block_q": 16, "block_kv": 16},
    "folded_split": {"fold": True, "kv_splits": 3, "block_q": 32, "block_kv": 32},
    "more_parts_than_tiles": {"fold": True, "kv_splits": 16, "block_q": 32, "block_kv": 64},
}
# Those of a few queries, and those of which some can be taken; not those that ask for the weights.
BUILT = {
    n: cases.build(n, "bthd", FEW) for n in cases.names() if n != "mask_function"
}  # its function counts from the row's index
NAMES = [n for n, c in BUILT.items() if c.q_len in (*range(6), FEW.length) and "return_weights" not in c.features]
IN_PARTS = ("dropout", "sinks", "bias", "segment_ids", "causal_window")
OFTEN = {
    ("bias", "folded_split", "bthd"),
    ("sinks_some_of_minus_infinity", "folded_split", "bhtd"),
    ("segment_ids", "split", "bthd"),
    ("dense_mask", "folded", "bhtd"),
    ("positions", "more_parts_than_tiles", "bthd"),
    ("fp8_kv", "folded_split", "bthd"),
}


def _few(name: str, layout: str) -> cases.Case:
    """The last 5 rows of a case, with fewer kv heads; some have as few rows already."""
    case = cases.build(name, layout, FEW)
    if case.kv_heads == case.heads and not case.scales:
        case = replace(case, kv_heads=FEW.kv_heads)
    return case if case.q_len <= 5 else cases.last_rows(case, 5)


@pytest.mark.parametrize(
    ("name", "way", "layout"),
    [
        pytest.param(*key, id="-".join(key), marks=[] if key in OFTEN else [SLOW])
        for key in covering(itertools.product(NAMES, WAYS, ("bthd", "bhtd")), 2, OFTEN)
    ],
)
def test_few_queries(name: str, way: str, layout: str) -> None:
    _check(WAYS[way], _few(name, layout), layout=layout)


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype", "layout"),
    [
        (80, 80, "float32", "bthd"),
        pytest.param(96, 40, "bfloat16", "bhtd", marks=SLOW),
        pytest.param(192, 128, "float32", "bhtd", marks=SLOW),
        pytest.param(72, 72, "float16", "bthd", marks=SLOW),
        pytest.param(8, 24, "float32", "bthd", marks=SLOW),
        pytest.param(256, 256, "bfloat16", "bthd", marks=SLOW),
        pytest.param(128, 64, "float32", "bthd", marks=SLOW),
    ],
)
def test_head_dims(dim: int, value_dim: int, dtype: str, layout: str) -> None:
    case = cases.build("causal_window", layout, replace(FEW, length=70))
    _check({"block_q": 32, "block_kv": 32}, replace(case, value_dim=value_dim), dtype, layout, dim)


@pytest.mark.parametrize("steps", [(2, 2, 8), (1, 4, 8), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_PARTS else [SLOW]) for n in BUILT])
def test_a_tile_in_parts(name: str, steps: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that end within a tile: its last parts are empty."""
    if "return_weights" in BUILT[name].features:
        pytest.skip("native only")
    monkeypatch.setattr(import_module("attnops.operators.flash.run_flash"), "steps_of", lambda *_: TileSteps(*steps))
    _check({"block_q": 32, "block_kv": 64}, BUILT[name])


MASKS = {
    "causal": (Causal(), lambda rows, keys: rows >= keys),
    "full": (Full(), lambda rows, keys: np.ones_like(rows >= keys)),
    "window": (SlidingWindow(10, 10), lambda rows, keys: abs(rows - keys) <= 10),
    "nothing": (~Full(), lambda rows, keys: np.zeros_like(rows >= keys)),
    "late": (Causal() & SlidingWindow(40), lambda rows, keys: (rows >= keys) & (rows - keys <= 40)),
}
SIZES = st.sampled_from((16, 32, 64, 128))


@SLOW
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(MASKS)),
    st.integers(1, 200),
    st.integers(1, 200),
    *[SIZES] * 6,
    st.integers(1, 5),
    st.sampled_from(((1, 1), (3, 1), (4, 2))),
)
def test_agrees_with_any_sizes(
    name: str, q_len: int, kv_len: int, q: int, kv: int, q_dkv: int, kv_dkv: int, q_dq: int, kv_dq: int, splits: int,
    heads: tuple[int, int],
) -> None:  # fmt: skip
    mask, seen = MASKS[name]
    visible = seen(np.arange(q_len)[:, None], np.arange(kv_len)[None])
    call = {"mask": mask, "query_offset": 0}
    lengths = {"q_len": q_len, "kv_len": kv_len}
    case = cases.Case("", frozenset(), call, visible, **lengths, heads=heads[0], kv_heads=heads[1], batch=1)
    of_queries = {"block_q": q, "block_q_dkv": q_dkv, "block_q_dq": q_dq}
    of_keys = {"block_kv": kv, "block_kv_dkv": kv_dkv, "block_kv_dq": kv_dq}
    _check(of_queries | of_keys | {"kv_splits": splits}, case)
