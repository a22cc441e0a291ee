"""Rows that the kernels in Mosaic GPU write while they attend: the pages after, every number of them, and what they attend to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import pytest
from paged_batches import PagedCase

from attnops.errors import InputError
from attnops.operators.mosaic.mosaic_rules import JAX_NEEDED

if jax.__version_info__ < JAX_NEEDED:
    pytest.skip(f"jax {jax.__version__}: its interpreter doesn't look for races", allow_module_level=True)

from mosaic_pages_runs import OF_QUANTISED, SEQUENCES, SIZES, same_pages, written
from paged_kernel_runs import last_rows, split

from attnops.operators.kernels.pages.mosaic.attend import PageRows, paged_attention_mosaic
from attnops.operators.kernels.pages.mosaic.page_tiles import PageStep, PageTiles

BF16: dict[str, Any] = {"dtype": "bfloat16", "page": 16}
F16: dict[str, Any] = {"dtype": "float16", "page": 16}
IN_PARTS = {generation: step._replace(splits=3) for generation, step in SIZES.items()}
OF_KIND = SEQUENCES | {"speculate": ((3, 139), (1, 80), (0, 5), (2, 2), (1, 64))}
# Last keys at the end of a tile, of a page, and after both; a page of several tiles; keys divided over blocks; every layout.
BOTH = [
    ("split", PagedCase("decode", (4, 2), sinks=True, **BF16), SIZES),
    ("heads", PagedCase("mixed", (4, 2), window=(30, 0), cap=3.0, **BF16), SIZES),
    ("split", PagedCase("long", (4, 1), (128, 128), dtype="bfloat16", page=256), IN_PARTS),
    ("joined", PagedCase("decode", (4, 2), dtype="float16", page=8), SIZES),
    ("interleaved", PagedCase("speculate", (4, 2), tree=3, **F16), SIZES),
    ("packed", PagedCase("mixed", (4, 2), chunk=50, **BF16), SIZES),
    ("latent", PagedCase("decode", (16, 1), (128, 64), latent=True, **BF16), SIZES),
    ("heads", PagedCase("decode", (4, 2), quantised="int8", scale="head", **BF16), OF_QUANTISED),
    ("joined", PagedCase("mixed", (4, 2), quantised="float8_e4m3fn", scale="tensor", **BF16), OF_QUANTISED),
]
CASES = [
    *((generation, layout, case, steps[generation]) for layout, case, steps in BOTH for generation in SIZES),
    ("hopper", "latent", PagedCase("mixed", (5, 1), (576, 512), latent=True, **BF16),
     PageStep(*[PageTiles(64, 1, 1, 2)] * 2, 1, 0)),
    ("blackwell", "latent", PagedCase("decode", (128, 1), (288, 256), latent=True, **BF16), SIZES["blackwell"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("generation", "layout", "case", "step"),
    [pytest.param(*x, marks=[pytest.mark.slow] * (i > 0)) for i, x in enumerate(CASES)],
    ids=lambda x: x if isinstance(x, str) else x.name if isinstance(x, PagedCase) else "",
)
def test_writes_its_own_rows_and_nothing_else(generation: str, layout: str, case: PagedCase, step: PageStep) -> None:
    whole = batches.make(case, OF_KIND[case.kind], spare=1)
    got, after = written(case, whole, layout, step, generation=generation)
    batches.agree(case, got, batches.expect(case, whole))
    assert last_rows(case, whole)
    assert same_pages(after, whole, layout)


@pytest.mark.slow
@pytest.mark.parametrize("generation", SIZES)
def test_drops_rows_without_a_page(generation: str) -> None:
    """A last page with an id out of range, a length beyond the table, and no sequences."""
    case = PagedCase("decode", (4, 2), **BF16)
    whole = batches.make(case, SEQUENCES["decode"], spare=1)
    before, rows = split(case, whole)
    places = last_rows(case, whole)

    def check(dropped: set[int], **changes: Any) -> None:
        pages = {name: before[name].copy() for name in ("key_pages", "value_pages")}
        for token, page, row in places:
            if token not in dropped:
                for name, x in pages.items():
                    x[page, row] = rows[name][token]
        assert same_pages(written(case, whole, generation=generation, **changes)[1], pages)

    table, lengths = whole["page_table"].copy(), whole["kv_lens"].copy()
    for bad in (-1, 10**6):
        table[0, 149 // 16] = bad  # of 150 keys
        check({0}, page_table=table)
    lengths[0] = table.shape[1] * case.page + 1
    check({0}, kv_lens=lengths)
    check({token for token, _, _ in places}, num_seqs=np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("generation", "heads", "change", "message"),
    [
        ("hopper", (4, 2), {"value": None}, "rows.value is None"),
        ("blackwell", (4, 2), {"key": np.zeros((7, 2, 64), np.float16)}, "float16"),
        ("hopper", (71, 1), {}, "more than 64 query heads"),
        ("blackwell", (140, 1), {}, "more than 128 query heads"),
    ],
)
def test_refuses_rows_that_pages_do_not_hold(
    generation: str, heads: tuple[int, int], change: dict[str, Any], message: str
) -> None:
    case = PagedCase("decode", heads, **BF16)
    whole = batches.make(case, SEQUENCES["decode"], spare=1)
    own = split(case, whole)[1]
    rows = PageRows(own["key_pages"], own["value_pages"])._replace(**change)
    static = {"interpret": True, "step": SIZES[generation], "generation": generation, "max_q_len": 1} | case.call
    with pytest.raises(InputError, match=message):
        jax.eval_shape(lambda: paged_attention_mosaic(**whole, rows=rows, **static))


@pytest.mark.parametrize("writes", [False, True])
def test_has_no_gradient(writes: bool) -> None:
    case = PagedCase("decode", (4, 2), **BF16)
    whole = batches.make(case, SEQUENCES["decode"], spare=1)
    own = split(case, whole)[1]
    rows = PageRows(own["key_pages"], own["value_pages"]) if writes else None
    static = {"interpret": True, "step": SIZES["hopper"], "generation": "hopper", "max_q_len": 1} | case.call

    def loss(query: jax.Array) -> jax.Array:
        return paged_attention_mosaic(**(whole | {"query": query}), rows=rows, **static)[0].astype(jnp.float32).sum()

    with pytest.raises(InputError, match="serving has no gradient"):
        jax.grad(loss)(jnp.asarray(whole["query"]))
