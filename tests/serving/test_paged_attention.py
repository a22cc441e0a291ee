"""Paged attention against the float64 reference, row by row, with every feature."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from covering import covering
from paged_batches import KINDS, PagedCase

from attnops.errors import InputError, InputTypeError
from attnops.operators.kernels.pages.paged import paged_attention

HEADS = {"smollm2": (9, 3), "mha": (2, 2), "one kv head": (5, 1), "llama": (8, 2)}
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
    {"chunk": 16, "window": (9, 0), "cap": 3.0, "sinks": True, "quantised": "int8", "scale": "token_head"},
    *({"quantised": q, "scale": s} for q in ("int8", "float8_e4m3fn") for s in ("tensor", "head", "token_head")),
    {"quantised": "float8_e5m2", "scale": "head", "window": (17, 0), "sinks": True},
    {"tree": 8},
    {"tree": 35, "window": (3, 0), "sinks": True, "quantised": "float8_e4m3fn", "scale": "head"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantised": "int8", "scale": "token_head", "cap": 3.0},
)
# What `make test` runs: each kind with all that can be on at once, and each feature, head and dim with some kind.
QUICK = (
    *(PagedCase(kind, window=(9, 0), cap=3.0, sinks=True, quantised="int8", scale="token_head") for kind in KINDS),
    *(PagedCase("mixed", HEADS[name]) for name in ("mha", "one kv head")),
    *(PagedCase(kind, dims=dims) for kind, dims in zip(("decode", "mixed"), ((192, 128), (80, 80)), strict=True)),
    PagedCase("prefill", (9, 3), dtype="bfloat16", window=(9, 0)),
    PagedCase("decode", (9, 3), dtype="bfloat16", sinks=True),
    PagedCase("mixed", window=(4, 3), causal=False),
    PagedCase("mixed", quantised="float8_e4m3fn", scale="head", cap=3.0),
    PagedCase("decode", quantised="float8_e5m2", scale="tensor", window=(17, 0)),
    PagedCase("mixed", sizes=None, page=16),
    PagedCase("mixed", chunk=10, sinks=True),
    PagedCase("mixed", tree=9, sinks=True),
    PagedCase("mixed", spans=True, window=(3, 0), sinks=True),
    *(
        PagedCase(kind, (6, 1), (40, 32), latent=True, **FEATURES[n])
        for kind, n in zip(KINDS, (7, 12, 15, 20), strict=True)
    ),
    PagedCase("decode", (16, 1), (576, 512), latent=True),
)
# Any two of them.
EVERY = [
    *(PagedCase(kind, heads, **FEATURES[n]) for kind, heads, n in covering(
        product(KINDS, HEADS.values(), range(len(FEATURES))), 2)),
    *(PagedCase(kind, dims=dims, dtype=dtype) for kind, dims, dtype in covering(
        product(KINDS, DIMS, ("float32", "bfloat16")), 2)),
    *(PagedCase(kind, sizes=sizes, page=page, window=window) for kind, sizes, page, window in covering(
        product(KINDS, (None, (1, 1, 1), (3, 2, 16), (8, 8, 64)), (8, 16), (None, (9, 0))), 2)),
    *(PagedCase(kind, dtype="float16") for kind in KINDS),
    *(PagedCase(kind, chunk=chunk, sinks=True) for kind, chunk in (("decode", 10), ("prefill", 16), ("speculate", 5))),
    PagedCase("mixed", chunk=7, causal=False, cap=3.0),
    PagedCase("prefill", prefix=20, cap=3.0, quantised="int8", scale="token_head"),
    PagedCase("decode", spans=True, window=(2, 0), sinks=True, quantised="float8_e4m3fn", scale="head"),
    PagedCase("speculate", spans=True, prefix=9, chunk=6),
    PagedCase("mixed", spans=True, prefix=13, window=(4, 1), causal=False),
    PagedCase("mixed", (6, 1), (40, 32), latent=True, spans=True, window=(9, 0), quantised="int8", scale="token_head"),
    PagedCase("mixed", spans=True, sizes=(1, 1, 1)),
    PagedCase("mixed", spans=True, tree=9, window=(5, 0)),
    PagedCase("mixed", chunk=16, window=(11, 0), quantised="int8", scale="head"),
    PagedCase("speculate", tree=3, window=(2, 0), quantised="int8", scale="token_head"),
    PagedCase("prefill", tree=40, chunk=10, cap=3.0),
    PagedCase("prefill", (6, 1), (40, 32), latent=True, tree=16, window=(4, 3), causal=False),
    *(PagedCase(kind, (heads, 1), dims, latent=True, **FEATURES[n]) for kind, heads, dims, n in covering(
        product(KINDS, (5, 32), ((576, 512), (320, 256), (96, 96)), range(len(FEATURES))), 2)),
]  # fmt: skip


def check(case: PagedCase) -> None:
    arrays = batches.make(case)
    batches.agree(case, batches.run(case, arrays), batches.expect(case, arrays))


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_agrees_with_the_reference(case: PagedCase) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in EVERY if case not in QUICK], ids=lambda case: case.name)
def test_agrees_with_the_reference_in_every_feature(case: PagedCase) -> None:
    check(case)


def test_a_decode_batch_gives_the_same_by_both_routes() -> None:
    case = PagedCase("decode", window=(9, 0))
    arrays = batches.make(case)
    batches.agree(case, batches.run(case, arrays, max_q_len=None), batches.expect(case, arrays))


@pytest.mark.parametrize("kind", ["decode", pytest.param("speculate", marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, (300, 0)])
def test_a_single_sequence_goes_in_large_blocks_and_smaller_last_ones(
    kind: str, window: tuple[int, int] | None
) -> None:
    """Lengths that end at, before and after both, in one program."""
    case = PagedCase(kind, (9, 3), window=window, sizes=None, page=16)
    most = case.static["max_q_len"]
    call = jax.jit(lambda arrays: paged_attention(**arrays, **case.call, max_q_len=most))
    lengths = [5, 256, 257, 1023, 1024, 1025, 2048, 3000, 4096]
    for length in lengths:
        arrays = batches.make(case, [(min(most, length), length)], width=4096 // 16, spare=0, seed=length)
        output, lse = (np.asarray(x, np.float64) for x in call(arrays))
        batches.agree(case, (output, lse), batches.expect(case, arrays))


def test_queries_beyond_max_q_len_are_not_attended() -> None:
    case = PagedCase("mixed")
    arrays = batches.make(case)
    output, lse = batches.run(case, arrays, max_q_len=2)
    want = batches.expect(case, arrays)
    beyond = np.ones(len(output), bool)
    for start, end in zip(arrays["cu_q_lens"], arrays["cu_q_lens"][1:9], strict=False):
        beyond[start : min(end, start + 2)] = False
    want.output[beyond], want.lse[beyond] = 0, -np.inf
    batches.agree(case, (output, lse), want)


def test_an_empty_batch_is_zero() -> None:
    case = PagedCase("mixed")
    arrays = batches.make(case) | {"num_seqs": np.zeros((), np.int32)}
    output, lse = batches.run(case, arrays)
    assert (output == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.slow
def test_indices_have_32_bits_under_x64() -> None:
    case = PagedCase("mixed", window=(9, 0), sinks=True)
    arrays = batches.make(case)
    with jax.enable_x64(True):
        text = jax.jit(lambda arrays: paged_attention(**arrays, **case.call, **case.static)).lower(arrays).as_text()
        got = batches.run(case, arrays)
    # Numbers alone are constants, converted where they stand; a padding is no array.
    assert not re.findall(r"tensor<\d+x[\dx]*[if]64>", re.sub(r"padding = .*?tensor<[\dx]*i64>", "", text))
    batches.agree(case, got, batches.expect(case, arrays))


def test_heads_split_over_devices() -> None:
    case = PagedCase("mixed", (12, 4), window=(9, 0), sinks=True)
    arrays = batches.make(case)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    heads = {"query": spec(None, "tp"), "sinks": spec("tp")}
    heads |= {n: spec(None, None, "tp") for n in ("key_pages", "value_pages")}
    specs = {n: heads.get(n, spec()) for n in arrays}
    local = lambda arrays: paged_attention(**arrays, **case.call, **case.static)  # noqa: E731
    out = spec(None, "tp")
    split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(out, out)))
    output, lse = (np.asarray(x, np.float64) for x in split(arrays))
    batches.agree(case, (output, lse), batches.expect(case, arrays))


@pytest.mark.parametrize("name", ["query", "value_pages"])
def test_has_no_gradient(name: str) -> None:
    case = PagedCase("mixed")
    arrays = {n: jnp.asarray(x) for n, x in batches.make(case).items()}

    def loss(x: Any) -> Any:
        return paged_attention(**(arrays | {name: x}), **case.call, **case.static)[0].sum()

    with pytest.raises(InputError, match="serving has no gradient"):
        jax.grad(loss)(arrays[name])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_table": np.zeros((3, 6), np.int32)}, InputError, "page_table has the shape"),
        ({"cu_q_lens": np.zeros(3, np.int32)}, InputError, "one more than kv_lens"),
        ({"kv_lens": np.zeros((2, 2), np.int32)}, InputError, "kv_lens has the shape"),
        ({"query": np.zeros((4, 5, 64), np.float32)}, InputError, "5 query heads on 2 kv heads"),
        ({"query": np.zeros((4, 6, 32), np.float32)}, InputError, "one dim for both"),
        ({"query": np.zeros((4, 6, 64), np.int32)}, InputTypeError, "query is int32"),
        ({"value_pages": np.zeros((3, 8, 2, 64), np.float32)}, InputError, "are at the same place"),
        ({"sinks": np.zeros((6, 2), np.float32)}, InputError, r"wanted \[heads\]"),
        ({"key_scale": np.float32(1)}, InputError, "key_scale was given for key_pages of float32"),
        ({"sliding_window": 5}, InputError, "sliding_window=5; wanted"),
        ({"max_q_len": 0}, InputError, "max_q_len=0; wanted"),
        ({"softmax_scale": "x"}, InputTypeError, "softmax_scale='x'; wanted"),
        ({"logits_soft_cap": -1.0}, InputError, "logits_soft_cap=-1.0; wanted"),
        ({"num_seqs": np.zeros(2, np.int32)}, InputError, "num_seqs has the shape"),
        ({"kv_lens": np.zeros(10, np.float32)}, InputTypeError, "kv_lens is float32"),
    ],
)
def test_says_what_does_not_fit(change: dict[str, Any], error: type[Exception], message: str) -> None:
    case = PagedCase("mixed")
    with pytest.raises(error, match=message):
        paged_attention(**(batches.make(case) | case.call | case.static | change))


def test_int8_pages_need_a_scale() -> None:
    case = PagedCase("mixed", quantised="int8")
    arrays = batches.make(case)
    del arrays["key_scale"]
    with pytest.raises(InputError, match="key_pages is int8, but key_scale is missing"):
        paged_attention(**arrays, **case.call)
