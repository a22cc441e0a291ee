"""Rows that the TPU kernel writes while it attends: the pages after, every number of them, and what it attends to."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from covering import covering
from jax.experimental.pallas import tpu as pltpu
from paged_batches import KINDS, PagedCase
from paged_kernel_runs import (
    ALTERNATING,
    LAYOUTS,
    PAGES,
    SIZES,
    as_rows,
    bits,
    fits,
    laid_out,
    last_rows,
    split,
)

from attnops.errors import InputError
from attnops.operators.kernels.pages.tpu import paged_attention_tpu

FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": (9, 0)},
    {"window": (4, 3), "causal": False, "sinks": True},
    {"dtype": "bfloat16", "cap": 3.0},
    *({"quantised": q, "scale": s} for q in ("int8", "float8_e4m3fn") for s in ("tensor", "head", "token_head")),
    {"quantised": "float8_e5m2", "scale": "token_head", "dtype": "bfloat16"},
)
QUICK = (
    ("heads", PagedCase("decode", page=32, dtype="bfloat16")),
    ("heads", PagedCase("mixed", quantised="int8", scale="token_head", window=(9, 0))),
    ("split", PagedCase("mixed", (9, 3), dtype="bfloat16", sinks=True)),
    ("split", PagedCase("decode", quantised="float8_e4m3fn", scale="token_head")),
    ("joined", PagedCase("decode", (9, 3), page=16)),
    ("joined", PagedCase("mixed", quantised="int8", scale="head", page=3)),
    ("latent", PagedCase("mixed", (6, 1), (72, 64), latent=True, quantised="int8", scale="token_head", page=16)),
    ("packed", PagedCase("decode", (8, 4), quantised="int8", scale="token_head")),
)
# Pages shorter than a tile, of several tiles, and that no tile divides; rows at a page's begin, within it and at its end.
EVERY = [
    (layout, PagedCase(kind, page=page, **FEATURES[n]))
    for layout, kind, page, n in covering(
        itertools.product(LAYOUTS[:3], ("decode", "mixed"), (1, 3, 16, 64), range(len(FEATURES))), 3
    )
]
EVERY += [
    ("latent", PagedCase(kind, (6, 1), (40, 32), page=page, latent=True, **FEATURES[n]))
    for kind, page, n in covering(itertools.product(("decode", "mixed"), (3, 16), range(len(FEATURES))), 2)
]
EVERY += [
    (layout, PagedCase(kind, (8, 4), (dim, dim), page=page, **FEATURES[n]))
    for layout, kind, dim, page, n in covering(
        itertools.product(ALTERNATING, ("decode", "mixed"), (64, 128), (1, 3, 16, 64), range(len(FEATURES))), 2
    )
]


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.name


def _call(case: PagedCase, layout: str, **more: Any) -> Any:
    static = {"max_q_len": case.static["max_q_len"], "interpret": True, "layout": layout} | case.call | SIZES | more
    if case.latent or layout == "packed":
        static["value_dim"] = case.dims[1]
    return jax.jit(lambda arrays, rows: paged_attention_tpu(**arrays, rows=rows, **static))


def _check(case: PagedCase, layout: str, **more: Any) -> None:
    whole = batches.make(case)
    before, rows = split(case, whole)
    call = _call(case, layout, **more)
    output, lse, after = call(laid_out(before, layout), as_rows(layout, rows))
    batches.agree(case, (np.asarray(output, np.float64), np.asarray(lse, np.float64)), batches.expect(case, whole))
    want = laid_out(whole, layout)
    for name, got in zip((*PAGES, "rope_pages"), after, strict=True):
        if got is None:
            assert np.ndim(want.get(name)) < 3
        else:
            assert (bits(got) == bits(want[name])).all(), name


@pytest.mark.parametrize(("layout", "case"), QUICK, ids=_name)
def test_writes_its_own_rows_and_nothing_else(layout: str, case: PagedCase) -> None:
    _check(case, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "case"), [x for x in EVERY if x not in QUICK and fits(*x)], ids=_name)
def test_writes_its_own_rows_and_nothing_else_in_every_feature(layout: str, case: PagedCase) -> None:
    _check(case, layout)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 16, 2), (3, 32, 3), (32, 16, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_with_any_sizes(layout: str, sizes: tuple[int, int, int]) -> None:
    names = ("pages_per_block", "queries_per_block", "buffers")
    _check(PagedCase("mixed", window=(17, 0)), layout, **dict(zip(names, sizes, strict=True)))


@pytest.mark.parametrize(
    ("layout", "case"), [QUICK[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in QUICK[1:])], ids=_name
)
def test_waits_for_what_it_writes(layout: str, case: PagedCase) -> None:
    """Copies happen no earlier than they are waited for."""
    _check(case, layout, interpret=pltpu.InterpretParams(dma_execution_mode="on_wait"))


@pytest.mark.parametrize("layout", ["heads", pytest.param("split", marks=pytest.mark.slow)])
def test_drops_rows_without_a_page_and_an_empty_batch_writes_nothing(layout: str) -> None:
    """A last page with an id out of range, a length beyond the table, and no sequences: one program."""
    case = PagedCase("decode")
    whole = batches.make(case, KINDS["decode"])
    before, rows = split(case, whole)
    call, own = _call(case, layout), as_rows(layout, rows)

    def pages_after(**changes: Any) -> list[np.ndarray]:
        after = call(laid_out(before | changes, layout), own)[2]
        return [bits(x) for x in (after.key, after.value)]

    def expected(dropped: set[int]) -> list[np.ndarray]:
        made = {n: before[n].copy() for n in ("key_pages", "value_pages")}
        for token, page, row in last_rows(case, whole):
            if token not in dropped:
                for name, x in made.items():
                    x[page, row] = rows[name][token]
        made = laid_out(before | made, layout)
        return [bits(made[n]) for n in ("key_pages", "value_pages")]

    def same(got: list[np.ndarray], want: list[np.ndarray]) -> bool:
        return all((a == b).all() for a, b in zip(got, want, strict=True))

    assert same(pages_after(), expected(set()))
    for bad in (-1, 10**6):
        table = whole["page_table"].copy()
        table[1, 4] = bad  # of 40 keys in pages of 8
        assert same(pages_after(page_table=table), expected({1}))
    lengths = whole["kv_lens"].copy()
    lengths[1] = table.shape[1] * case.page + 1
    assert same(pages_after(kv_lens=lengths), expected({1}))
    assert same(pages_after(num_seqs=np.zeros(1, np.int32)), expected(set(range(9))))
    assert same(pages_after(num_seqs=np.ones(1, np.int32)), expected(set(range(1, 9))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": np.zeros((42, 2, 32), np.float32)}, r"rows.key is \(\(42, 2, 32\)"),
        ({"value": None}, r"rows.value is None"),
        ({"value": np.zeros((42, 2, 64), np.float16)}, r"float16"),
        ({"key_scale": np.zeros((42, 2), np.float32)}, r"wanted None"),
    ],
)
def test_refuses_rows_that_pages_do_not_hold(change: dict[str, Any], message: str) -> None:
    case = PagedCase("mixed")
    whole = batches.make(case)
    tokens = len(whole["query"])
    fit = lambda x: x if x is None or x.shape[0] == tokens else np.resize(x, (tokens, *x.shape[1:]))  # noqa: E731
    rows = as_rows("heads", split(case, whole)[1])._replace(**{name: fit(x) for name, x in change.items()})
    with pytest.raises(InputError, match=message.replace("42", str(tokens))):
        jax.eval_shape(lambda: _call(case, "heads")(laid_out(whole, "heads"), jax.tree.map(jnp.asarray, rows)))
