"""Static masks against brute force: what they mean, as rectangles, intervals and blocks."""

from __future__ import annotations

import itertools

import brute_masks as brute
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops.masks import Blocks, Causal, Chunked, Full, MaskFunction, Prefix, SlidingWindow, window_tokens
from attnops.masks.seen_keys import certainly_seen

lengths = st.integers(1, 40)
many = settings(deadline=None, max_examples=400)


@given(brute.trees(brute.LEAVES | brute.FUNCTIONS), st.data(), st.integers(-20, 45))
@many
def test_materialise(spec, data, query_offset):
    start, q, kv_start, kv = (data.draw(lengths) for _ in range(4))
    rows, cols = range(start, start + q), range(kv_start, kv_start + kv)
    mask = brute.build(spec)
    seen = mask.materialise(slice(start, start + q), slice(kv_start, kv_start + kv), query_offset=query_offset)
    assert type(seen) is np.ndarray
    assert (seen.dtype, seen.shape) == (bool, (1, 1, q, kv))
    np.testing.assert_array_equal(seen[0, 0], brute.dense(spec, rows, cols, query_offset))


@given(brute.trees(brute.LEAVES), lengths, lengths, st.integers(0, 20), st.integers(-20, 45))
@many
def test_row_intervals(spec, q_len, kv_len, start, query_offset):
    lo, hi = brute.build(spec).row_intervals(np.arange(start, start + q_len), kv_len, query_offset=query_offset)
    assert lo.dtype == hi.dtype == np.int64
    assert lo.shape == hi.shape == (lo.shape[0], q_len)
    used = 0
    for column in range(q_len):
        runs = [(a, b) for a, b in zip(lo[:, column], hi[:, column], strict=True) if a < b]
        used = max(used, len(runs))
        seen = [j for a, b in runs for j in range(a, b)]
        wanted = [j for j in range(kv_len) if brute.sees(spec, start + column, j, query_offset)]
        assert seen == wanted
        assert all(b < a for (_, b), (a, _) in itertools.pairwise(runs)), "adjacent"
        rest = slice(len(runs), None)
        assert (lo[rest, column] == kv_len).all()
        assert (hi[rest, column] == kv_len).all()
    assert lo.shape[0] == max(1, used)


@given(
    brute.trees(brute.LEAVES | brute.FUNCTIONS),
    st.tuples(lengths, lengths, st.integers(1, 17), st.integers(1, 17), st.integers(0, 20), st.integers(0, 30)),
    st.integers(-20, 45),
)
@many
def test_live_blocks_and_dead_rows(spec, sizes, query_offset):
    q_len, kv_len, block_q, block_kv, q_start, k_start = sizes
    mask, rows = brute.build(spec), range(q_start, q_start + q_len)
    at = {"q_start": q_start, "query_offset": query_offset}
    later = brute.dense(spec, rows, range(k_start, k_start + kv_len), query_offset)
    found = mask.live_blocks(block_q, block_kv, q_len=q_len, kv_len=kv_len, k_start=k_start, **at)
    assert found.tolist() == brute.blocks(later, block_q, block_kv)
    seen = brute.dense(spec, rows, range(kv_len), query_offset)
    found = mask.live_blocks(block_q, block_kv, q_len=q_len, kv_len=kv_len, **at)
    assert found.dtype == np.int8
    assert found.tolist() == brute.blocks(seen, block_q, block_kv)
    assert mask.may_have_dead_rows(q_len, kv_len, **at) is bool((~seen.any(axis=1)).any())


@given(
    brute.trees(brute.LEAVES | brute.FUNCTIONS),
    st.tuples(lengths, lengths, st.integers(0, 20), st.integers(0, 30)),
    st.integers(-20, 45),
)
@many
def test_seen_keys(spec, sizes, query_offset):
    q_len, kv_len, q_start, k_start = sizes
    rows, keys = range(q_start, q_start + q_len), range(k_start, k_start + kv_len)
    seen = brute.dense(spec, rows, keys, query_offset)
    at = {"q_start": q_start, "query_offset": query_offset, "k_start": k_start}
    found = certainly_seen(brute.build(spec), q_len, kv_len, **at)
    assert found.dtype == np.bool_
    assert found.tolist() == [seen.any(axis=0).tolist()]


def test_seen_keys_of_heads_and_of_too_many_cells():
    layout = np.zeros((3, 4, 5), bool)
    layout[0, 3, 2] = layout[2, :, 4] = True
    found = certainly_seen(Blocks(layout, 10, 8), 40, 39)
    assert found.tolist() == [[j // 8 in kv for j in range(39)] for kv in ((2,), (), (4,))]
    assert certainly_seen(Causal(), 1 << 17, 1 << 17).all()
    hidden = MaskFunction("test_thirds") & ~MaskFunction("test_thirds")  # each pair would have to be tested
    assert certainly_seen(hidden, 1 << 15, 1 << 15) is None
    assert not certainly_seen(hidden, 1 << 10, 1 << 10).any()


@given(brute.trees(brute.LEAVES | brute.FUNCTIONS), st.integers(-5, 30))
@many
def test_bind(spec, query_offset):
    mask = brute.build(spec)
    bound = mask.bind(query_offset)
    assert not bound.needs_offset
    where = slice(0, 13), slice(0, 19)
    seen = mask.materialise(*where, query_offset=query_offset)
    np.testing.assert_array_equal(bound.materialise(*where, query_offset=7), seen)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_window_conventions(n):
    seen = (Causal() & window_tokens(n)).materialise(slice(0, 8), slice(0, 8))[0, 0]
    assert seen.sum(axis=1).tolist() == [min(i + 1, n) for i in range(8)]
    inclusive = SlidingWindow(left=n, right=0).materialise(slice(0, 8), slice(0, 8))[0, 0]
    assert inclusive[7].sum() == n + 1
    both = SlidingWindow(n, n).materialise(slice(0, 8), slice(0, 8))[0, 0]
    assert both[4].tolist() == [abs(j - 4) <= n for j in range(8)]


def test_offsets():
    assert Causal().needs_offset
    assert not Causal(0).needs_offset
    assert not (Full() & Prefix(3)).needs_offset
    assert (Prefix(3) | ~MaskFunction("test_thirds")).needs_offset
    cache = Causal().materialise(slice(0, 1), slice(0, 6), query_offset=4)[0, 0, 0]
    assert cache.tolist() == [True] * 5 + [False]
    explicit = Causal(offset=1).materialise(slice(0, 1), slice(0, 6), query_offset=4)[0, 0, 0]
    assert explicit.tolist() == [True] * 2 + [False] * 4


def test_offset_per_batch():
    offsets = np.array([0, 3, -5])
    for found in (offsets, jnp.asarray(offsets)):
        seen = (Causal() & Chunked(3)).materialise(slice(1, 5), slice(0, 7), query_offset=found)
        assert isinstance(seen, np.ndarray) is (found is offsets)
        assert seen.shape == (3, 1, 4, 7)
        for b, offset in enumerate(offsets):
            spec = ("and", [("causal", None), ("chunked", 3, None)])
            np.testing.assert_array_equal(seen[b, 0], brute.dense(spec, range(1, 5), range(7), int(offset)))


@given(brute.trees(brute.LEAVES, 2), st.integers(-20, 20))
@settings(deadline=None, max_examples=40)
def test_same_in_numpy_and_jax(spec, offset):
    # Strict promotion, as operators run under it; negative positions, as lax.div rounds towards zero.
    rows, cols = np.arange(20, dtype=np.int32)[:, None], np.arange(30, dtype=np.int32)[None, :]
    mask = brute.build(spec)
    with jax.numpy_dtype_promotion("strict"):
        seen = mask.test(jnp.asarray(rows), jnp.asarray(rows + offset), jnp.asarray(cols))
    np.testing.assert_array_equal(seen, mask.test(rows, rows + offset, cols))


def test_rows_that_differ_in_their_number_of_intervals():
    lo, hi = (Prefix(3) | SlidingWindow(left=0)).row_intervals(np.arange(6), 6)
    assert lo.tolist() == [[0] * 6, [6, 6, 6, 6, 4, 5]]
    assert hi.tolist() == [[3, 3, 3, 4, 3, 3], [6, 6, 6, 6, 5, 6]]


@pytest.mark.parametrize("size", [3, 4])
def test_chunks_of_negative_positions(size):
    # lax.div rounds towards zero, so position -1 would share chunk 0.
    rows, cols = jnp.arange(4)[:, None], jnp.arange(6)[None, :]
    seen = Chunked(size).test(rows, rows - 2, cols)
    np.testing.assert_array_equal(seen, brute.dense(("chunked", size, -2), range(4), range(6)))


def test_128k_blocks_are_counted_not_built():
    count = 131072 // 512
    mask = Causal() & SlidingWindow(left=4095)
    found = mask.live_blocks(512, 512, q_len=131072, kv_len=131072)
    i, j = np.indices((count, count))
    assert ((found > 0) == ((j <= i) & (i - j <= 8))).all()
    assert ((found == 2) == ((j < i) & (i - j <= 7))).all()
    lo, hi = mask.row_intervals(np.arange(131072), 131072)
    assert lo.shape == hi.shape == (1, 131072)


def test_wide_grids_are_cut_into_slabs(monkeypatch):
    mask, sizes = Causal(3) | Prefix(5) | ~Chunked(7), {"q_len": 61, "kv_len": 53}
    whole = mask.live_blocks(4, 3, **sizes)
    monkeypatch.setattr("attnops.masks.grid._ROWS", 8)
    monkeypatch.setattr("attnops.masks.grid.CELLS", 40)
    assert (mask.live_blocks(4, 3, **sizes) == whole).all()
    by_test = mask & (MaskFunction("test_thirds") | ~MaskFunction("test_thirds"))
    assert (by_test.live_blocks(4, 3, **sizes) == whole).all()
    assert by_test.may_have_dead_rows(**sizes) == mask.may_have_dead_rows(**sizes)


def test_no_rows_and_no_keys():
    assert Full().live_blocks(8, 8, q_len=0, kv_len=9).shape == (0, 2)
    assert Full().live_blocks(8, 8, q_len=9, kv_len=0).shape == (2, 0)
    assert not Full().may_have_dead_rows(0, 0)
    assert Full().may_have_dead_rows(1, 0)
    assert MaskFunction("test_thirds").live_blocks(8, 8, q_len=9, kv_len=0).shape == (2, 0)
    assert MaskFunction("test_thirds").may_have_dead_rows(1, 0)
