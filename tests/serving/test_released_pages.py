"""Pages that a window has left behind: padding at the beginning of the page table, which is never read, checked by value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_batches as batches
import paged_kernel_runs as kernel_runs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import PagedCase

from attnops import InputError, KVCache, OperationMetadata, OperationRegistry, RefusedError, SlidingWindow
from attnops.operators.paged_cache import CacheState, RaggedBatch, attend, init, insert
from attnops.planning.cache.kv_cache import LayerGroup

# -- the kernels -------------------------------------------------------------------------------------------------------

CASES = (
    PagedCase("mixed", window=(9, 0)),
    PagedCase("decode", window=(17, 0), quantised="int8", scale="token_head", sinks=True),
    PagedCase("prefill", (9, 3), dtype="bfloat16", window=(3, 0)),
    PagedCase("speculate", window=(7, 0), sizes=None),
    PagedCase("mixed", chunk=14, sinks=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_released_pages_reach_no_output(case: PagedCase) -> None:
    """Held against the reference over the pages as they were before they were released."""
    arrays = batches.make(case)
    want = batches.expect(case, arrays)
    batches.agree(case, batches.run(case, batches.released(case, arrays)), want)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (CASES[0], "heads"),
        pytest.param(CASES[4], "heads", marks=pytest.mark.slow),
        pytest.param(CASES[1], "split", marks=pytest.mark.slow),
        pytest.param(CASES[2], "joined", marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_released_pages_reach_no_output_of_the_tpu_kernel(case: PagedCase, layout: str) -> None:
    arrays = batches.make(case)
    want = batches.expect(case, arrays)
    batches.agree(case, kernel_runs.run(case, batches.released(case, arrays), layout), want)


def test_the_reference_reads_no_released_page() -> None:
    case = CASES[0]
    arrays = batches.make(case)
    whole, fewer = batches.expect(case, arrays), batches.expect(case, batches.released(case, arrays))
    np.testing.assert_allclose(fewer.output, whole.output, rtol=0, atol=1e-14)
    np.testing.assert_allclose(fewer.lse, whole.lse, rtol=0, atol=1e-14)
    with pytest.raises(IndexError, match="among the sequence's keys"):
        batches.expect(batches.varied(case, window=(10 + case.page, 0)), batches.released(case, arrays))


# -- the checks of a batch ---------------------------------------------------------------------------------------------

WINDOW = 6
CACHE = KVCache(
    layers=[LayerGroup(layers=1, window_tokens=WINDOW)],
    kv_heads=2,
    head_dim=8,
    dtype="float32",
    page_size=4,
    pages=32,
    max_sequences=4,
    max_length=40,
    max_tokens=12,
)
PLAN = CACHE.plan(device_kind="cpu")


def one_row(q_len: int, length: int, gone: int) -> dict[str, Any]:
    """A row whose first `gone` pages were released."""
    pages = -(-length // 4)
    return {"cu_q_lens": [0, q_len], "kv_lens": [length], "page_table": [[32] * gone + [*range(gone, pages)]]}


@given(st.integers(0, 8), st.integers(0, 32), st.integers(0, 10))
def test_padding_is_right_where_no_query_sees_its_page(q_len: int, before: int, gone: int) -> None:
    """By going through the queries: the first sees tokens from position - WINDOW + 1 on, and a row without queries has a next."""
    length = before + q_len
    gone = min(gone, -(-length // 4))
    seen = {token // 4 for position in range(before, length) for token in range(position - WINDOW + 1, position + 1)}
    seen |= {token // 4 for token in range(max(0, before - WINDOW + 1), length)}
    if any(page in seen for page in range(gone)):
        with pytest.raises(InputError, match=r"row 0: (page number|kv_len)"):
            RaggedBatch.make(PLAN, **one_row(q_len, length, gone))
    else:
        RaggedBatch.make(PLAN, **one_row(q_len, length, gone))


def test_what_padding_is_wrong_is_said() -> None:
    RaggedBatch.make(PLAN, **one_row(2, 20, 3))  # the first query, at 18, sees 13 to 18
    with pytest.raises(
        InputError, match=r"row 0: page number 3 is padding; .* a window of 6 tokens .* pages 3 to 4 of 4"
    ):
        RaggedBatch.make(PLAN, **one_row(2, 20, 4))
    with pytest.raises(InputError, match="row 0: page number 4 is padding"):
        RaggedBatch.make(PLAN, cu_q_lens=[0, 1], kv_lens=[18], page_table=[[32, 32, 32, 5]])
    whole = KVCache(**CACHE.to_dict() | {"layers": 1}).plan(device_kind="cpu")
    with pytest.raises(InputError, match="row 0: kv_len 20 needs 5 pages of 4, but the table has 0"):
        RaggedBatch.make(whole, **one_row(2, 20, 3))


def arrays_of(tokens: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((tokens, heads, 8), np.float32) for heads in (4, 2, 2)]


def wrong_batch() -> RaggedBatch:
    """A page that a query sees is padding; RaggedBatch.make would refuse it."""
    good = RaggedBatch.make(PLAN, **one_row(2, 20, 3))
    table = np.array(good.page_table)
    table[0, 3] = 32
    return RaggedBatch(good.cu_q_lens, good.kv_lens, table, good.num_seqs)


def test_a_known_batch_is_checked_at_the_step_and_a_traced_one_with_debug() -> None:
    query, key, value = arrays_of(2)
    call = lambda state, batch: attend(state, 0, batch, query, key, value, sliding_window=(5, 0)).output  # noqa: E731
    with pytest.raises(InputError, match="page number 3 is padding"):
        call(init(CACHE), wrong_batch())
    with pytest.raises(InputError, match="page number 3 is padding"):
        insert(init(CACHE), 0, wrong_batch(), key, value)
    traced = jax.jit(lambda state, batch: insert(state, 0, batch, key, value, debug=True).layers[0].key)
    traced(init(CACHE), RaggedBatch.make(PLAN, **one_row(2, 20, 3))).block_until_ready()

    def run() -> None:
        jax.block_until_ready(traced(init(CACHE), wrong_batch()))
        jax.effects_barrier()

    with pytest.raises(Exception, match="page number 3 is padding"):
        run()


# -- the window of a step against the group's --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ({"sliding_window": (5, 0)}, True),
        ({"sliding_window": (2, 0)}, True),
        ({"sliding_window": 3}, True),
        ({"mask": SlidingWindow(left=4, right=0)}, True),
        ({}, False),
        ({"sliding_window": (6, 0)}, False),
        ({"sliding_window": (None, 0)}, False),
        ({"sliding_window": 6}, False),
    ],
    ids=str,
)
def test_a_larger_window_than_the_groups_is_refused(call: dict[str, Any], fits: bool) -> None:
    paged, batch = OperationRegistry.create("paged"), RaggedBatch.make(PLAN, **one_row(2, 20, 3))
    query, key, value = arrays_of(2)
    plan = paged.plan(query, key, value, cache=CACHE, batch=batch, **call)
    codes = [reason.code for rejected in plan.rejected for reason in rejected.reasons]
    assert codes == ([] if fits else ["paged.window_prefix"])
    run = lambda: paged(query, key, value, state=init(CACHE), layer=0, batch=batch, **call)  # noqa: E731
    if fits:
        assert plan.implementation == "paged.forward_native"
        return
    with pytest.raises(RefusedError, match=r"window of 6 tokens.*\[paged.window_prefix\].*sliding_window=\(5, 0\)"):
        run()
    if "mask" not in call and not isinstance(call.get("sliding_window"), int):
        with pytest.raises(InputError, match="kept for a window of 6 tokens"):
            attend(init(CACHE), 0, batch, query, key, value, **call)


def test_writing_alone_needs_no_window() -> None:
    paged = OperationRegistry.create("paged")
    _, key, value = arrays_of(2)
    batch = RaggedBatch.make(PLAN, **one_row(2, 20, 3))
    out = paged(None, key, value, state=init(CACHE), layer=0, batch=batch, mode="insert")
    np.testing.assert_array_equal(out.state.layers[0].key[4, 2:], key)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_a_step_over_released_pages_is_one_over_all(seed: int) -> None:
    """Through the operation, with NaN in what was released, against float64 over the whole sequences."""
    random = np.random.default_rng(seed)
    lens = random.integers(1, 40, 3)
    q_lens = [int(random.integers(0, min(n, 4) + 1)) for n in lens]
    order, table, gone = list(random.permutation(32)), [], []
    for q_len, length in zip(q_lens, lens, strict=True):
        first = max(0, int(length) - q_len - WINDOW + 1) // 4
        table.append([32] * first + [int(order.pop()) for _ in range(first, -(-int(length) // 4))])
        gone.append(first)
    history = [[random.standard_normal((int(n), 2, 8)).astype(np.float32) for _ in range(2)] for n in lens]
    pages = np.full((2, 32, 4, 2, 8), np.nan, np.float32)
    for own, ids, q_len, length in zip(history, table, q_lens, lens, strict=True):
        for place in range(int(length) - q_len):
            if ids[place // 4] < 32:
                pages[:, ids[place // 4], place % 4] = own[0][place], own[1][place]
    state = init(CACHE)
    layer = state.layers[0]._replace(key=jnp.asarray(pages[0]), value=jnp.asarray(pages[1]))
    state = CacheState((layer,), CACHE)
    starts = np.cumsum([0, *q_lens])
    query = random.standard_normal((12, 4, 8)).astype(np.float32)
    key, value = np.zeros((2, 12, 2, 8), np.float32)
    for own, first, q_len in zip(history, starts, q_lens, strict=False):
        if q_len:
            key[first : first + q_len], value[first : first + q_len] = (x[-q_len:] for x in own)
    batch = RaggedBatch.make(PLAN, cu_q_lens=starts, kv_lens=lens, page_table=table, tokens=12)
    output = np.asarray(_step(state, batch, query, key, value), np.float64)
    assert (output[starts[-1] :] == 0).all()
    for own, first, q_len, length in zip(history, starts, q_lens, lens, strict=False):
        keys, values = (np.repeat(x.astype(np.float64), 2, axis=1) for x in own)
        for row in range(q_len):
            position = int(length) - q_len + row
            near = slice(max(0, position - WINDOW + 1), position + 1)
            for head in range(4):
                logits = keys[near, head] @ query[first + row, head].astype(np.float64) / np.sqrt(8)
                weights = np.exp(logits - logits.max())
                want = weights @ values[near, head] / weights.sum()
                np.testing.assert_allclose(output[first + row, head], want, rtol=0, atol=1e-5)


@jax.jit
def _step(state: CacheState, batch: RaggedBatch, query: Any, key: Any, value: Any) -> Any:
    paged = OperationRegistry.create("paged", OperationMetadata())
    call = {"state": state, "layer": 0, "batch": batch, "sliding_window": (WINDOW - 1, 0)}
    return paged(query, key, value, **call).attention_outputs


def test_a_window_holds_and_reads_few_of_the_pages() -> None:
    """1,024 tokens of 32k, pages of 16: 64 of 2,048 pages, held and read."""
    fields = CACHE.to_dict() | {"page_size": 16, "max_length": 32768, "pages": 512, "max_tokens": 64}
    cache = KVCache(**fields | {"layers": [{"layers": 1, "window_tokens": 1024}]})
    first = (32768 - 1024) // 16
    table = [[512] * first + [*range(64 * n, 64 * (n + 1))] for n in range(4)]
    batch = RaggedBatch.make(cache.plan(), cu_q_lens=range(5), kv_lens=[32768] * 4, page_table=table)
    paged = OperationRegistry.create("paged")
    shapes = [jax.ShapeDtypeStruct((4, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    reads = paged.plan(*shapes, cache=cache, batch=batch, sliding_window=(1023, 0)).reads
    assert reads is not None
    assert (reads.live, reads.held) == (4 * 64, 4 * 64)
    assert 24 * reads.live <= 4 * 2048
