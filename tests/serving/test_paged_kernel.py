"""The TPU kernels of paged attention in Pallas' interpreter, against the float64 reference, row by row."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from covering import covering
from paged_batches import KINDS, PagedCase
from paged_kernel_runs import ALTERNATING, LAYOUTS, check, fits, laid_out, program, run

from attnops.errors import InputError
from attnops.operators.kernels.pages.tpu import paged_attention_tpu

HEADS = ((9, 3), (2, 2), (5, 1), (16, 2), (16, 1))
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": (9, 0)},
    {"window": (None, 0), "causal": False},
    {"window": (4, 3), "causal": False},
    {"causal": False},
    {"cap": 3.0},
    {"sinks": True},
    {"window": (9, 0), "cap": 3.0, "sinks": True},
    {"chunk": 10},
    {"chunk": 7, "causal": False},
    {"chunk": 32, "window": (9, 0), "cap": 3.0, "sinks": True, "quantised": "int8", "scale": "token_head"},
    *({"quantised": q, "scale": s} for q in ("int8", "float8_e4m3fn") for s in ("tensor", "head", "token_head")),
    {"quantised": "float8_e5m2", "scale": "head", "window": (17, 0), "sinks": True},
    {"tree": 8, "causal": False},
    {"tree": 35, "window": (3, 0), "sinks": True, "quantised": "float8_e4m3fn", "scale": "head"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantised": "int8", "scale": "token_head", "cap": 3.0},
)
ALL_ON: dict[str, Any] = {"window": (9, 0), "cap": 3.0, "sinks": True, "quantised": "int8"}
# Each kind, layout, feature, dtype, head and dim with some others: a case is a program of its own, seconds to compile.
QUICK = (
    ("heads", PagedCase("mixed", (9, 3), **ALL_ON, scale="token_head")),
    ("split", PagedCase("mixed", (9, 3), **ALL_ON, scale="head")),
    ("joined", PagedCase("mixed", dtype="bfloat16", window=(4, 3), causal=False)),
    ("heads", PagedCase("speculate", dims=(192, 128), dtype="bfloat16", sinks=True)),
    ("split", PagedCase("decode", (16, 2), dtype="bfloat16", window=(9, 0))),
    ("split", PagedCase("decode", quantised="int8", scale="token_head")),
    ("joined", PagedCase("decode", (9, 3), quantised="float8_e5m2", scale="tensor", sinks=True)),
    ("joined", PagedCase("decode", (5, 1), dims=(128, 128))),
    ("heads", PagedCase("decode", (2, 2), dims=(80, 80), quantised="float8_e4m3fn", scale="token_head")),
    ("heads", PagedCase("prefill", dims=(64, 64), causal=False, cap=3.0)),
    ("heads", PagedCase("mixed", (9, 3), chunk=10, sinks=True)),
    ("heads", PagedCase("mixed", tree=12, sinks=True)),
    ("heads", PagedCase("mixed", spans=True, window=(3, 0), sinks=True)),
    ("latent", PagedCase("mixed", (18, 1), (72, 64), latent=True, **ALL_ON, scale="token_head")),
    ("heads", PagedCase("mixed", (16, 1), window=(9, 0), sinks=True)),
    ("latent", PagedCase("decode", (16, 1), (576, 512), latent=True, dtype="bfloat16")),
    ("latent", PagedCase("speculate", (5, 1), (40, 32), latent=True, quantised="float8_e4m3fn", scale="tensor")),
    ("latent", PagedCase("mixed", (18, 1), (72, 64), latent=True, **ALL_ON, scale="token_head", rope="bfloat16")),
    ("latent", PagedCase("decode", (16, 1), (40, 32), latent=True, quantised="int8", scale="head", rope="float32")),
    ("packed", PagedCase("decode", (16, 2), dtype="bfloat16", window=(9, 0), sinks=True)),
    ("interleaved", PagedCase("speculate", (8, 4), (128, 128), quantised="float8_e4m3fn", scale="token_head")),
)
# Any three of layout, kind, heads and feature; any two of the others.
EVERY = [
    ("split", PagedCase("mixed", chunk=7, causal=False)),
    ("split", PagedCase("prefill", prefix=20, cap=3.0, quantised="int8", scale="token_head")),
    ("heads", PagedCase("decode", spans=True, window=(2, 0), sinks=True, quantised="float8_e4m3fn", scale="head")),
    ("joined", PagedCase("speculate", spans=True, prefix=9, chunk=6)),
    ("heads", PagedCase("mixed", spans=True, tree=9, window=(5, 0))),
    ("joined", PagedCase("mixed", (9, 3), spans=True, prefix=13, window=(4, 1), causal=False, dtype="bfloat16")),
    ("latent", PagedCase("mixed", (16, 1), (40, 32), latent=True, spans=True, window=(9, 0), quantised="int8")),
    ("joined", PagedCase("decode", chunk=32, window=(11, 0))),
    ("latent", PagedCase("prefill", (6, 1), (40, 32), latent=True, chunk=18, quantised="int8", scale="token_head")),
    ("joined", PagedCase("prefill", tree=40, chunk=10, quantised="int8", scale="token_head")),
    ("latent", PagedCase("speculate", (16, 1), (40, 32), latent=True, tree=3, window=(1, 0), cap=3.0)),
    ("packed", PagedCase("mixed", (8, 4), **ALL_ON, scale="head")),
    ("packed", PagedCase("mixed", (9, 3), spans=True, prefix=13, window=(4, 1), causal=False, dtype="bfloat16")),
    ("interleaved", PagedCase("mixed", (8, 2), (128, 128), spans=True, tree=9, window=(5, 0), dtype="bfloat16")),
    ("packed", PagedCase("prefill", (8, 2), prefix=20, cap=3.0, quantised="float8_e5m2", scale="token_head")),
    *((layout, PagedCase(kind, heads, (dim, dim), **FEATURES[n])) for layout, kind, heads, dim, n in covering(
        itertools.product(ALTERNATING, KINDS, (*HEADS, (8, 4)), (64, 128, 256), range(len(FEATURES))), 2)),
    *((layout, PagedCase(kind, heads, **FEATURES[n])) for layout, kind, heads, n in covering(
        itertools.product(LAYOUTS[:3], KINDS, HEADS, range(len(FEATURES))), 3)),
    *((layout, PagedCase(kind, dims=dims, dtype=dtype)) for layout, kind, dims, dtype in covering(
        itertools.product(LAYOUTS, ("decode", "mixed"), DIMS, ("float32", "bfloat16")), 2)),
    *((layout, PagedCase(kind, page=page, window=window)) for layout, kind, page, window in covering(
        itertools.product(LAYOUTS, KINDS, (1, 3, 16), (None, (9, 0))), 2)),
    *(("latent", PagedCase(kind, (heads, 1), dims, latent=True, **FEATURES[n])) for kind, heads, dims, n in covering(
        itertools.product(KINDS, (5, 32), ((576, 512), (320, 256), (96, 96)), range(len(FEATURES))), 2)),
    *(("latent", PagedCase(kind, (heads, 1), (576, 512), latent=True, quantised=quantised, scale=scale, rope=rope, cap=cap))
      for kind, heads, quantised, scale, rope, cap in covering(itertools.product(
          KINDS, (5, 32), ("int8", "float8_e4m3fn"), ("tensor", "head", "token_head"), ("bfloat16", "float32"), (None, 3.0)), 2)),
]  # fmt: skip


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize(("layout", "case"), QUICK, ids=_name)
def test_agrees_with_the_reference(layout: str, case: PagedCase) -> None:
    check(case, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "case"), [x for x in EVERY if x not in QUICK and fits(*x)], ids=_name)
def test_agrees_with_the_reference_in_every_feature(layout: str, case: PagedCase) -> None:
    check(case, layout)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 16, 2), (3, 32, 3), (8, 16, 5), (32, 64, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_agrees_with_any_sizes(layout: str, sizes: tuple[int, int, int]) -> None:
    names = ("pages_per_block", "queries_per_block", "buffers")
    check(PagedCase("mixed", window=(17, 0)), layout, **dict(zip(names, sizes, strict=True)))


@pytest.mark.slow
def test_a_decode_batch_gives_the_same_without_knowing_it() -> None:
    check(PagedCase("decode", window=(9, 0)), "heads", max_q_len=None)


@pytest.mark.parametrize(
    "layout", ["joined", *(pytest.param(x, marks=pytest.mark.slow) for x in ("heads", "interleaved"))]
)
def test_rows_may_be_padded(layout: str) -> None:
    case = PagedCase("decode", (4, 2), dims=(80, 80))
    arrays = batches.make(case)
    batches.agree(case, run(case, arrays, layout, pad=48, value_dim=80), batches.expect(case, arrays))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_beyond_max_q_len_are_not_attended(layout: str) -> None:
    case = PagedCase("mixed", sinks=True)
    arrays = batches.make(case)
    want = batches.expect(case, arrays)
    beyond = np.ones(len(want.output), bool)
    for start, end in zip(arrays["cu_q_lens"], arrays["cu_q_lens"][1:9], strict=False):
        beyond[start : min(end, start + 2)] = False
    want.output[beyond], want.lse[beyond] = 0, -np.inf
    batches.agree(case, run(case, arrays, layout, max_q_len=2), want)


def test_any_order_of_pages_and_an_empty_batch_and_ids_that_are_no_pages() -> None:
    """One program, several batches."""
    case = PagedCase("mixed", window=(19, 0))
    arrays = batches.make(case)
    call = program(case)
    want = call(laid_out(arrays, "heads"))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(arrays["key_pages"]))
        places = np.append(np.argsort(order), len(order)).astype(np.int32)  # padding stays padding
        moved = {n: arrays[n][order] for n in ("key_pages", "value_pages")}
        moved["page_table"] = places[arrays["page_table"]]
        got = call(laid_out(arrays | moved, "heads"))
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(got, want, strict=True))

    output, lse = call(laid_out(arrays | {"num_seqs": np.zeros(1, np.int32)}, "heads"))
    assert (np.asarray(output) == 0).all()
    assert np.isneginf(np.asarray(lse)).all()

    # Values that are infinite stay in their sequence, whose pages others' blocks of buffers held before.
    infinite = arrays["value_pages"].copy()
    infinite[arrays["page_table"][0, :2]] = np.inf
    got = np.asarray(call(laid_out(arrays | {"value_pages": infinite}, "heads"))[0])
    assert np.isposinf(got[0]).any()
    assert (got[1:] == np.asarray(want[0])[1:]).all()

    for s in range(int(arrays["num_seqs"][0])):  # batched is one at a time
        first, last = arrays["cu_q_lens"][s : s + 2]
        alone = arrays | {n: np.roll(arrays[n], -s, axis=0) for n in ("kv_lens", "page_table")}
        alone["cu_q_lens"] = np.full_like(arrays["cu_q_lens"], 2**30)
        alone["cu_q_lens"][:2] = 0, last - first
        alone["query"] = np.roll(arrays["query"], -first, axis=0)
        got = np.asarray(call(laid_out(alone | {"num_seqs": np.ones(1, np.int32)}, "heads"))[0])
        np.testing.assert_allclose(got[: last - first], np.asarray(want[0])[first:last], rtol=0, atol=2e-6)
        assert (got[last - first :] == 0).all()


@pytest.mark.parametrize("layout", ["split", pytest.param("heads", marks=pytest.mark.slow)])
def test_ids_that_are_no_pages_are_no_keys(layout: str) -> None:
    """Not clamped into another's page: as if the keys there were masked."""
    case = PagedCase("mixed")
    arrays = batches.make(case, ((1, 24), (6, 40)))
    fewer = {n: x.copy() for n, x in arrays.items()}
    # Without a window positions don't count, so a page that isn't seen may as well be cut off.
    fewer["kv_lens"][:2] = 16, 32
    fewer["page_table"][1, :-1] = fewer["page_table"][1, 1:]
    want, call = batches.expect(case, fewer), program(case, layout)
    for bad in (10**6, -1, len(arrays["key_pages"])):
        arrays["page_table"][0, 2], arrays["page_table"][1, 0] = bad, bad
        output, lse = call(laid_out(arrays, layout))
        batches.agree(case, (np.asarray(output, np.float64), np.asarray(lse, np.float64)), want)


@pytest.mark.slow
def test_any_chunking_is_one_prefill() -> None:
    """Each chunk beside a decoding row; keys of later chunks aren't written yet when a chunk is attended to."""
    case, length = PagedCase("mixed", window=(19, 0)), 47
    whole = batches.make(case, ((1, 9), (length, length)))
    want = batches.expect(case, whole).output[1 : 1 + length]
    call, table = program(case), whole["page_table"][1]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        cuts = [0, *sorted(rng.choice(np.arange(1, length), rng.integers(1, 6), replace=False)), length]
        got = np.zeros_like(want)
        for start, end in itertools.pairwise(cuts):
            arrays = {n: x.copy() for n, x in whole.items()}
            for j in range(end, length):
                for name in ("key_pages", "value_pages"):
                    arrays[name][table[j // case.page], j % case.page] = np.nan
            arrays["query"][1 : 1 + end - start] = whole["query"][1 + start : 1 + end]
            arrays["cu_q_lens"][:3] = 0, 1, 1 + end - start
            arrays["kv_lens"][1] = end
            got[start:end] = call(laid_out(arrays, "heads"))[0][1 : 1 + end - start]
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_x64_and_in_a_split_program(layout: str) -> None:
    case = PagedCase("mixed", window=(9, 0), sinks=True)
    arrays = batches.make(case)
    want = batches.expect(case, arrays)
    with jax.enable_x64(True):
        batches.agree(case, run(case, arrays, layout), want)


def _arrays(**changes: Any) -> dict[str, Any]:
    return laid_out(batches.make(PagedCase("mixed")), "heads") | changes


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({}, {"layout": "rows"}, "layout='rows'; wanted one of split"),
        ({}, {"layout": "packed"}, "value_pages given"),
        ({"value_pages": None}, {"layout": "packed"}, r"2 kv_heads / 1, 1, dim\] for float32"),
        (
            {"value_pages": None, "key_pages": np.zeros((4, 8, 3, 64), np.float32)},
            {"layout": "interleaved"},
            "2 kv_heads, dim",
        ),
        (
            {"value_pages": None, "key_pages": np.zeros((4, 8, 4, 32), np.float32)},
            {"layout": "interleaved"},
            "at least 64",
        ),
        ({}, {"layout": "joined"}, "value_pages given"),
        ({"value_pages": None}, {}, "value_pages missing"),
        ({"key_pages": np.zeros((4, 2, 8, 32), np.float32)}, {}, "at least dim"),
        ({}, {"value_dim": 100}, "rows of at least value_dim=100"),
        ({}, {"pages_per_block": 33}, "pages_per_block=33 is more than the 32"),
        ({}, {"queries_per_block": 12}, "isn't a multiple of 8"),
        ({}, {"buffers": 1}, "one buffer leaves none"),
        ({"query": np.zeros((42, 6, 64), np.float16)}, {}, "the query is float16"),
        ({"sinks": np.zeros(5, np.float32)}, {}, "sinks has the shape"),
        ({"key_scale": np.float32(1)}, {}, "key_scale was given"),
        ({"page_table": np.zeros((10, 30000), np.int32)}, {}, "page table of 10 sequences x 30000 pages"),
    ],
)
def test_says_what_does_not_fit(change: dict[str, Any], more: dict[str, Any], message: str) -> None:
    call = PagedCase("mixed").call | {"layout": "heads"} | more
    with pytest.raises(InputError, match=message):
        jax.eval_shape(lambda: paged_attention_tpu(**_arrays(**change), **call, interpret=True))


def test_has_no_gradient() -> None:
    arrays = {n: None if x is None else jnp.asarray(x) for n, x in _arrays().items()}
    call = PagedCase("mixed").call | {"layout": "heads", "interpret": True}
    loss = lambda query: paged_attention_tpu(**(arrays | {"query": query}), **call)[0].sum()  # noqa: E731
    with pytest.raises(InputError, match="serving has no gradient"):
        jax.grad(loss)(arrays["query"])
